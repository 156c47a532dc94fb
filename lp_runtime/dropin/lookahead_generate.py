"""Drop-in for transformers: `model.generate(..., custom_generate=lookahead_generate)`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import LauncherConfig, RuntimeConfig
from lp_runtime.constraints.compiled import CompiledConstraint, compile_constraint
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.distributed.environment import started_by_torchrun
from lp_runtime.distributed.exchange import broadcast_object, gather_rows
from lp_runtime.distributed.process_group import existing_or_new_group
from lp_runtime.distributed.transport.group import Group
from lp_runtime.dropin.generate_call import GenerateCall
from lp_runtime.dropin.rows import Rows
from lp_runtime.dropin.runner_cache import RunnerKeeper, runner_of
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ConfigError
from lp_runtime.model.checks.make_runner import check_runner
from lp_runtime.model.hf.config import attention_settings
from lp_runtime.model.hf.types import CausalLM, GenerationConfig, StoppingCriteriaList, Tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tensor_parallel.tp_plan import lockstep_settings, tp_size_of
from lp_runtime.sampling.types import LogitsProcessor

# Per model, from earlier calls: an entry means that it passed the self-check; the value has its measurements. They only
# affect speed, never the output, so keeping them between calls is safe.
_known: weakref.WeakKeyDictionary[CausalLM, dict[tuple, Measured]] = weakref.WeakKeyDictionary()
_runners = RunnerKeeper()


def lookahead_generate(
    model: CausalLM,
    input_ids: torch.Tensor,
    logits_processor: Sequence[LogitsProcessor],
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    W: int | None = None,
    N: int | None = None,
    G: int | None = None,
    lookahead: LookaheadConfig | None = None,
    seed: int | None = None,
    share_ranks: bool = True,
    exactness: str = "fast",
    strict_tokens: int = RuntimeConfig.strict_tokens,
    constraint: ConstraintConfig | None = None,
    constraint_tokenizer: Tokenizer | None = None,
    **model_kwargs: object,
) -> torch.Tensor | object:
    """Decode as `generate` would, in fewer steps.

        model.generate(**inputs, custom_generate=lookahead_generate, max_new_tokens=128)

    Supports greedy search and sampling with generation configs, logits processors, stopping criteria, streamers, padded
    batches (rows are decoded one after another, as if alone), and `return_dict_in_generate` with `output_scores`,
    `output_logits` and the cache. For models whose layers hold more than keys, values and recurrent states, the output
    has no cache.
    Greedy output is that of `generate`. Samples have the same distribution as those of `generate`, with different
    noise: one seed gives one output for any W, N, G and number of ranks.
    Under torchrun all ranks make the same call and share its work. Ranks that hold one model together (transformers'
    `tp_plan`) are one replica; their steps have a fixed size, 32 nodes if none of W, N and G is given.

    Args:
        model: loaded by the caller. It is only read, so several threads may call at once.
        input_ids: [B, L] int64.
        logits_processor: as prepared by `generate`.
        stopping_criteria: as prepared by `generate`.
        generation_config: as prepared by `generate`.
        W: window size in columns, >= 0. If none of W, N and G is given, every step's size is chosen automatically.
        N: n-gram size, >= 2.
        G: largest number of guesses verified in a step, >= 0.
        lookahead: a complete LookaheadConfig instead of W, N and G; its draft_tables must be "request".
        seed: seed of the samples, 0 to 2**64 - 1. Each row is sampled as if alone with this seed; rows with equal
            prompts are independent samples. Default: taken from torch's generator, which `torch.manual_seed` controls;
            all rows are then independent.
        share_ranks: False if torchrun's ranks decode different prompts, each its own.
        exactness: "fast" or "strict", see RuntimeConfig.
        strict_tokens: tokens of every forward pass with exactness="strict", >= 2.
        constraint: what the new text must match; compiled in this call, without a time limit.
        constraint_tokenizer: the model's tokenizer; required with a constraint.
        model_kwargs: keyword arguments that `generate` would pass to the model.

    Returns:
        The output of `generate`: [B, L + new tokens] token ids, or an output object.

    Raises:
        ConfigError: if a setting is out of range or not supported.
        RequestError: if a prompt is empty or too long for the model, or a stopping criterion fails on shared ranks.
        ConstraintError: if the constraint is invalid, or no text can satisfy it.
        ModelError: if the model fails the self-check, which runs at its first call.
        LaunchError: if torchrun's ranks do not form a group in time.
    """
    if lookahead is None:
        lookahead = LookaheadConfig(W=W, N=N, G=G)
    elif (
        not isinstance(lookahead, LookaheadConfig)
        or (W, N, G) != (None, None, None)
        or (lookahead.draft_tables, lookahead.corpus) not in (("auto", None), ("request", None))
    ):
        raise ConfigError(
            f"lookahead={lookahead}: must be a LookaheadConfig with draft_tables=request, without a corpus; W, N and G"
            " must then be left out"
        )
    RuntimeConfig(lookahead=lookahead, exactness=exactness, strict_tokens=strict_tokens)  # checks the values
    sampling = SamplingConfig(seed=seed)
    is_split = tp_size_of(model) > 1
    call = GenerateCall(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    if is_split:
        lookahead = lockstep_settings(lookahead, call.time_left())
    tokens = strict_tokens if exactness == "strict" else None
    make = functools.partial(runner_of, model, tokens)
    with _ranks(model.device, share_ranks and not is_split) as group, _runners.runner(model, (tokens,), make) as runner:
        measured = _checked(model, runner, group)
        calibration = Calibration(runner, group, RuntimeConfig.cache_dir, measured)
        if call.do_sample and seed is None:
            with _ranks(model.device, share_ranks or is_split) as ranks:
                sampling.seed = broadcast_object(int(torch.randint(2**63 - 1, ())), ranks)
            call.samples = list(range(len(call.rows)))  # all rows independent, whatever their prompts
        compiled, grammars = _compiled(constraint, constraint_tokenizer, runner.vocabulary_size, call.eos_token_ids)
        engine = Engine(runner, group, calibration, grammars=grammars)
        return Rows(call, runner, group, engine, lookahead, sampling, compiled).decode()


def _compiled(
    constraint: ConstraintConfig | None,
    tokenizer: Tokenizer | None,
    vocabulary_size: int,
    eos_token_ids: frozenset[int],
) -> tuple[CompiledConstraint | None, Grammars | None]:
    if constraint is None or constraint.kind is None:
        return None, None
    if tokenizer is None or not eos_token_ids:
        missing = "constraint_tokenizer=" if tokenizer is None else "an end-of-sequence token, which ends the text"
        raise ConfigError(f"constraint: needs {missing}")
    grammars = Grammars(lambda: tokenizer, vocabulary_size, eos_token_ids)
    info = grammars.vocabulary(with_special_tokens=constraint.kind == "structural_tag").info
    return compile_constraint(constraint, info), grammars


def _checked(model: CausalLM, runner: ModelRunner, group: Group) -> Measured:
    """Check a model at its first call; return the measurements of earlier calls.

    Either all ranks of the group have a measurement, or all return an empty `Measured`.
    """
    kind = (runner.strict_tokens, runner.dtype, str(attention_settings(runner.model)), group.size)
    known = _known.setdefault(model, {})
    if kind not in known:
        check_runner(runner)
        known[kind] = Measured()
    measured = known[kind]
    was_measured = np.array([measured.steps is not None, measured.vocabulary is not None], dtype=np.int64)
    if (gather_rows(was_measured, group) != was_measured).any():
        known[kind] = Measured()  # ranks have different measurements: all measure again
    return known[kind]


@contextmanager
def _ranks(device: torch.device, share_ranks: bool) -> Iterator[Group]:
    if share_ranks and started_by_torchrun():
        with existing_or_new_group(device, LauncherConfig.timeout) as group:
            yield group
    else:
        yield Group.alone()
