"""A request as the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.constraints.compiled import CompiledConstraint
from lp_runtime.sampling.types import LogitsProcessor


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt_ids: token ids, at least one, all in the vocabulary.
        lookahead: what is drafted, and how much of it.
        max_new_tokens: tokens to generate at most, >= 1.
        eos_token_ids: tokens to stop after; empty to go on to `max_new_tokens`.
        sampling: settings that override the model's own defaults; the seed is set where the request samples.
        sample: which of several independent samples of one seed, >= 0.
        stop: strings; decoding stops after the first that the new text contains.
        max_time: seconds after which to stop, at the end of a step; None for no limit.
        logprobs: whether to report the log-probability of each new token.
        top_logprobs: how many of the likeliest tokens are reported with each log-probability.
        prompt_logprobs: whether log-probabilities of the prompt's tokens are reported with that of the first new token.
        processors: logits processors of the caller's own, run after transformers' processors and before its warpers.
        trace: whether to report which replica has verified each token.
        request_id: names the request in logs; empty if nobody has named it.
        cache_salt: keys and values are shared, by the prefix cache, among requests of equal salts alone.
        committed: new tokens that an earlier attempt at the request has committed; decoding goes on behind them, and
            only later tokens are reported.
        constraint: what the new text must be; None for any text.
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
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    trace: bool = False
    request_id: str = ""
    cache_salt: str = ""
    committed: tuple[int, ...] = ()
    constraint: CompiledConstraint | None = None

    @property
    def sampling_key(self) -> str:
        """Text that tells what decides which successors are sampled, beside the prompt and the processors."""
        constraint = None if self.constraint is None else self.constraint.key
        return repr((self.sampling, self.sample, self.stop, self.logprobs, self.top_logprobs, constraint))
