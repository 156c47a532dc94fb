"""A request as the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt_ids: token ids, at least one, all in the vocabulary.
        lookahead: what is proposed, and how much of it.
        max_new_tokens: tokens to generate at most, >= 1.
        eos_token_ids: where to stop; empty to go on to max_new_tokens.
        sampling: what overrides the model's own defaults; its seed is set where it samples.
        sample: which of several samples of the prompt, >= 0.
        stop: strings of new text after whose end to stop.
        max_time: seconds after which to stop, at the end of a step.
        logprobs: whether to report the log-probability of each token.
        processors: logits processors of the user's own, run after transformers' processors and before its warpers.
        trace: whether to report which replica has found each token.
        committed: new tokens that an earlier attempt has committed: decoding goes on behind them, and only what is new
            is yielded.
    """

    prompt_ids: tuple[int, ...]
    lookahead: LookaheadConfig
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sample: int = 0
    stop: tuple[str, ...] = ()
    max_time: float | None = None
    logprobs: bool = False
    processors: tuple[Any, ...] = ()
    trace: bool = False
    committed: tuple[int, ...] = ()
