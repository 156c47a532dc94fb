"""Events that the engine yields for a request: a StepOutput per step, then a Report."""

from __future__ import annotations

from dataclasses import dataclass

from lp_runtime.lookahead.drafter import DraftCounts, PoolStatistics
from lp_runtime.request.step_timer import StepTimes

MODEL = "model"  # source of a token that was not drafted
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability) of the likeliest tokens, likeliest first


class Logprob(float):
    """A token's log-probability: a float that carries `top` and `prompt`.

    Attributes:
        top: the likeliest tokens at the token's position; empty if not requested.
        prompt: on the first new token, the log-probabilities of the prompt's tokens from the second on, if requested;
            else empty.
    """

    top: TopLogprobs
    prompt: tuple[Logprob, ...]

    def __new__(cls, value: float, top: TopLogprobs = (), prompt: tuple[Logprob, ...] = ()) -> Logprob:
        self = super().__new__(cls, value)
        self.top, self.prompt = top, prompt
        return self


@dataclass(frozen=True)
class StepOutput:
    """Tokens that one step committed, at least one.

    Attributes:
        logprobs: the model's log-probability of each token, a Logprob if top or prompt log-probabilities are requested;
            None if not requested.
        found_by: rank of the replica that verified each token; None without a trace.
        sources: origin of each token: one of the drafter's sources, or MODEL; None without a trace.
        cached_tokens: of the first output of a request; see Report. 0 in later outputs.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    found_by: list[int] | None = None
    sources: list[str] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Report:
    """Statistics of a finished request.

    Attributes:
        num_steps: steps, including the prefill's; a step with several forward passes (exactness="strict") counts once
            per pass.
        finish_reason: "eos", "stop" (a stop string), "length", "time" or "cancelled".
        step_tokens: tokens fed per step, mean over replicas and steps, without the prefill.
        seconds: from the start of the request to its last token; loading excluded.
        prefill_seconds: part of `seconds` spent in the prefill, its step included.
        times: split of the other steps' time.
        exchange_bytes: mean bytes that a replica sends per step.
        counts: draft tokens fed and accepted, by source and depth.
        pool: the n-gram pool at the end; None if the drafter has none.
        seed: seed of the sample; None if decoding was greedy.
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        steps_without_drafter: steps of one token each, while the drafter was still being compiled; see Engine.prepare.
        losses: replicas lost during the request; times, tokens and counts then only cover the part after the last loss.
    """

    num_steps: int
    finish_reason: str
    step_tokens: float
    seconds: float
    prefill_seconds: float
    times: StepTimes
    exchange_bytes: float
    counts: DraftCounts
    pool: PoolStatistics | None
    seed: int | None
    cached_tokens: int = 0
    steps_without_drafter: int = 0
    losses: int = 0

    @classmethod
    def of_unstarted(cls, seed: int | None) -> Report:
        """Return the report of a request that was cancelled before it was fed."""
        return cls(0, "cancelled", 0.0, 0.0, 0.0, StepTimes(0.0, 0.0, 0.0), 0.0, DraftCounts(), None, seed)


Event = StepOutput | Report  # a StepOutput per step, then a Report
