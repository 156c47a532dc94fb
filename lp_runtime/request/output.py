"""What the engine yields for a request: a StepOutput a step, a Report at the end."""

from __future__ import annotations

from dataclasses import dataclass

from lp_runtime.lookahead.drafter import Counts
from lp_runtime.lookahead.drafters.paper.pool import PoolStatistics
from lp_runtime.request.step_timer import StepTimes

MODEL = "model"  # source of a token that was not drafted
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability) of the likeliest tokens, likeliest first


class Logprob(float):
    """A token's log-probability, and what was asked for beside it.

    Args:
        value: the log-probability.
        top: the likeliest tokens at its place.
        prompt: of the first new token, the log-probabilities of the prompt's tokens but the first; else empty.

    Attributes:
        top: see Args.
        prompt: see Args.
    """

    top: TopLogprobs
    prompt: tuple[Logprob, ...]

    def __new__(cls, value: float, top: TopLogprobs = (), prompt: tuple[Logprob, ...] = ()) -> Logprob:
        """Return a float that carries `top` and `prompt`."""
        self = super().__new__(cls, value)
        self.top, self.prompt = top, prompt
        return self


@dataclass(frozen=True)
class StepOutput:
    """What one step committed.

    Attributes:
        token_ids: the committed tokens, at least one.
        logprobs: the model's log-probability of each, a Logprob where more is asked for; None if the request does not
            ask for them.
        found_by: rank of the replica that has verified each; None if the request does not ask for a trace.
        sources: where each came from: one of the drafter's sources, or MODEL; None if the request does not ask for a
            trace.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    found_by: list[int] | None = None
    sources: list[str] | None = None


@dataclass(frozen=True)
class Report:
    """What a finished request took.

    Attributes:
        num_steps: steps, the prefill's included; where a step takes several forward passes, each counts.
        finish_reason: "eos", "stop", "length", "time" or "cancelled".
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token.
        prefill_seconds: of `seconds`, the prefill's step.
        times: of `seconds`, where the other steps' time went.
        exchange_bytes: bytes that a replica sends in a step, mean.
        counts: draft tokens fed and accepted, by source and depth.
        pool: the n-gram pool at the end; None if the drafter has none.
        seed: of the sample; None if decoding was greedy.
        cached_tokens: tokens of the prompt whose keys and values came out of the prefix cache.
        losses: replicas that were lost on the way; times, tokens and counts are then those after the last loss.
    """

    num_steps: int
    finish_reason: str
    step_tokens: float
    seconds: float
    prefill_seconds: float
    times: StepTimes
    exchange_bytes: float
    counts: Counts
    pool: PoolStatistics | None
    seed: int | None
    cached_tokens: int = 0
    losses: int = 0


Event = StepOutput | Report  # one StepOutput a step, and a Report at the end
