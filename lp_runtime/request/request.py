"""A request as the engine accepts it: token ids and checked settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.constraints.compiled import CompiledConstraint
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.text.reasoning import Reasoning

MIN_SECONDS_LEFT = 1e-3  # of a resumed request's time limit if it has passed: it then ends after one step


@dataclass(frozen=True)
class Request:
    """One prompt to decode. Fields that are not listed are those of RequestOptions.

    It is sent to replicas in the encoding of utils/encoding.py, so a field's type must be one that this can decode.
    """

    prompt_ids: tuple[int, ...]
    lookahead: LookaheadConfig
    max_new_tokens: int  # upper bound on new tokens, >= 1
    eos_token_ids: frozenset[int] = frozenset()  # tokens to stop after; empty to ignore end-of-sequence tokens
    # Overrides the model's own defaults; the seed is set if the request samples.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sample: int = 0
    stop: tuple[str, ...] = ()
    stop_after: int = 0
    max_time: float | None = None  # seconds after which to stop, at the end of a step; None for no limit
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False  # whether to report the prompt's log-probabilities with that of the first new token
    # The caller's logits processors, run after transformers' processors and before its warpers.
    processors: tuple[LogitsProcessor, ...] = ()
    trace: bool = False
    request_id: str = ""
    cache_salt: str = ""
    # New tokens of an earlier attempt; decoding continues after them, and only later tokens are reported.
    committed: tuple[int, ...] = ()
    constraint: CompiledConstraint | None = None  # what the new text must match; None for any text
    is_answer: bool = False
    skip_special_tokens: bool = True
    reasoning: Reasoning | None = None
    prediction: tuple[int, ...] = ()
    # Tools that an answer may call; None if the new text is not parsed as a message.
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def text_context(self) -> tuple[int, ...]:
        """Tokens that the new text continues: the prompt, or none if the text is an answer."""
        return () if self.is_answer else self.prompt_ids

    def after(self, new_tokens: Sequence[int], seconds: float) -> Request:
        """Return the rest of this request, `seconds` later, after `new_tokens` have been committed."""
        left = None if self.max_time is None else max(MIN_SECONDS_LEFT, self.max_time - seconds)
        return replace(self, committed=(*self.committed, *new_tokens), max_time=left)

    @property
    def draft_scope(self) -> str | None:
        """Scope of requests whose draft tables serve this one; None if only those of its text do."""
        return self.cache_salt if self.lookahead.shares_drafts else None

    @property
    def sampling_key(self) -> str:
        """Text of all that decides the sampled tokens except prompt and processors, for the digest."""
        constraint = None if self.constraint is None else self.constraint.key
        stops = self.stop, self.stop_after, self.is_answer, self.skip_special_tokens, self.reasoning
        return repr((self.sampling, self.sample, stops, self.logprobs, self.top_logprobs, constraint))
