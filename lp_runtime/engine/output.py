"""What the engine yields for a request: a StepOutput a step, a Report at the end."""

from __future__ import annotations

from dataclasses import dataclass

from lp_runtime.engine.step_timer import StepTimes
from lp_runtime.lookahead.drafters.base import Counts
from lp_runtime.lookahead.drafters.paper.pool import PoolStatistics


@dataclass(frozen=True)
class StepOutput:
    """What one step committed: token ids, and for each, if the request asks for it, the model's log-probability and the
    rank that has found it."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    found_by: list[int] | None = None


@dataclass(frozen=True)
class Report:
    """What a finished request took.

    Attributes:
        num_steps: steps, the prefill's included; where a step takes several forward passes, each counts.
        finish_reason: "eos", "stop", "length", "time" or "cancelled".
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token.
        prefill_seconds: of these, the prefill's step.
        times: of these, where the other steps' went.
        exchange_bytes: bytes that a replica sends in a step, mean.
        counts: tokens fed and accepted, by where they came from and how deep they stood.
        pool: the n-gram pool at the end; None where the drafter has none.
        seed: of the sample; None if decoding was greedy.
        losses: replicas that were lost on the way; times, tokens and counts are then of what came after the last loss.
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
    losses: int = 0


Event = StepOutput | Report  # a run a step, and a report at the end
