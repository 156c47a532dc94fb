"""A model that transformers has made tensor-parallel: its ranks run every forward pass together, as one replica.

All ranks make the same call and take the same steps, each on the same logits, and send nothing but what the model's own
layers send. So no decision may come from what a rank sees alone: its clock, above all.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.process_group import num_processes
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.model.tensor_parallel.layers import is_sliced

FIXED_WINDOW = LookaheadConfig(W=8, N=3, G=8)  # 32 nodes a step, where measurements would choose


def tp_size_of(model: PreTrainedModel) -> int:
    """Return how many ranks hold a model together; 1 for a whole model, and for a shard of ours.

    Calls no collective.

    Args:
        model: tensor-parallel by transformers' `tp_plan`, sharded by FSDP, or whole.

    Raises:
        ModelError: if its weights are split in another way than by a `tp_plan` over all ranks.
    """
    if is_sliced(model):
        return 1
    num_ranks = getattr(model, "tp_size", None) or 1
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())  # a DTensor has one
    largest = max((mesh.size() for mesh in meshes if mesh is not None), default=1)
    num_all = num_processes() if max(num_ranks, largest) > 1 else 1
    if largest > num_ranks or num_ranks not in (1, num_all):
        split = f"over {largest} ranks, and not by a tp_plan" if largest > num_ranks else f"over {num_ranks} ranks"
        raise ModelError(
            f"{model.config.model_type}: its weights are split {split}; load it whole, or with tp_plan='auto' over all"
            f" {num_all} ranks"
        )
    return num_ranks


def lockstep_settings(lookahead: LookaheadConfig, max_time: float | None) -> LookaheadConfig:
    """Return settings by which ranks decide alike without telling one another: steps of a fixed size, and no prior.

    Args:
        lookahead: the caller's.
        max_time: seconds that the call may take; None for no limit.

    Raises:
        ConfigError: if there is a time limit, which every rank would see pass at another step.
    """
    if max_time is not None:
        raise ConfigError("max_time: cannot be kept by a model that is split over ranks: each has a clock of its own")
    W, N, G = (FIXED_WINDOW if lookahead.is_auto else lookahead).window
    return replace(lookahead, W=W, N=N, G=G, prior="none")
