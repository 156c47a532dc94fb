"""Choice of a model's runner and self-check: token trees if the model supports them, else chains."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lp_runtime.distributed.precision import warn_of_tf32
from lp_runtime.errors import ModelError
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.checks.chain_check import check_chains
from lp_runtime.model.checks.self_check import check_model_or_disable_graphs
from lp_runtime.model.forward.following import LeadingShard
from lp_runtime.model.loading.loader import QUIET_LIBRARIES
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.support import why_chains


def make_runner(
    model: PreTrainedModel,
    prefill_chunk: int,
    strict_tokens: int | None = None,
    own_attention: bool = False,
    leading: LeadingShard | None = None,
) -> ModelRunner:
    """Make the runner that feeds a model token trees, or chains if it cannot be fed trees.

    Raises ModelError if the model can be fed neither, or only chains with exactness=strict or several shards.
    """
    if model.device.type == "cuda" and model.dtype == torch.float32:
        warn_of_tf32()
    reason = why_chains(model)
    if reason is None:
        return ModelRunner(model, prefill_chunk, strict_tokens, own_attention, leading)
    if strict_tokens is not None:
        raise ModelError(f"{reason}; it is fed chains of guesses, which exactness=strict does not support")
    if leading is not None:
        raise ModelError(f"{reason}; it is fed chains of guesses, which needs gpus_per_replica=1")
    try:
        return ChainRunner(model, prefill_chunk)
    except ModelError as error:
        raise ModelError(f"{reason}; nor chains of guesses: {error}") from error


def check_runner(runner: ModelRunner) -> float:
    """Self-check a model before its first request; return the largest relative difference of its logits.

    Captured passes are disabled if only they fail.
    """
    with QUIET_LIBRARIES:  # `generate` has notices for its callers
        if not isinstance(runner, ChainRunner):
            return check_model_or_disable_graphs(runner)
        try:
            return check_chains(runner)
        except ModelError as error:
            raise ModelError(f"{why_chains(runner.model)}; nor chains of guesses: {error}") from error
