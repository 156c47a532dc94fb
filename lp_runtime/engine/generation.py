"""What a request produces: pieces while it runs, a Generation at the end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from lp_runtime.engine.output import Event, Report
from lp_runtime.engine.step_timer import StepTimes
from lp_runtime.lookahead.drafters.base import Counts
from lp_runtime.lookahead.drafters.paper.pool import PoolStatistics
from lp_runtime.model.tokenizer import StopStrings, TextStream


@dataclass(frozen=True)
class Generation:
    """What one request produced.

    Attributes:
        text: the new text.
        token_ids: the new tokens.
        steps: steps it took, the prefill's included; further forward passes of exactness="strict" count as steps.
        step_tokens: tokens fed a step, mean over replicas and steps, the prefill's excluded.
        seconds: from the request's start to its last token; loading excluded.
        finish_reason: "eos", "stop" (a stop string), "length", "time" or "cancelled".
        seed: of the sample; None if decoding was greedy.
        logprobs: the model's log-probability of each new token, before processors; None if not asked for.
        prefill_seconds, times, exchange_bytes, counts, pool, losses: see lp_runtime.engine.sequence.Report.
    """

    text: str
    token_ids: list[int]
    steps: int
    step_tokens: float
    seconds: float
    finish_reason: str
    seed: int | None
    logprobs: list[float] | None
    prefill_seconds: float
    times: StepTimes
    exchange_bytes: float
    counts: Counts
    pool: PoolStatistics | None
    losses: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def compression_ratio(self) -> float:
        """S: new tokens / steps; 0 if it was cancelled before the first."""
        return self.num_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Delta:
    """What one step added.

    Attributes:
        text: text that the step's tokens completed; may be empty.
        token_ids: the step's tokens; empty in a last piece that only completes the text.
        logprobs: the model's log-probability of each, if asked for.
        found_by: the rank that has found each, if asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    found_by: list[int] | None = None


class GenerationStream:
    """Iterates over the pieces of one request. Close it early to cancel the request.

    Attributes:
        generation: the whole, once the iteration has ended; None before.
        has_text: False where the model has no tokenizer, so that pieces are token ids alone.
    """

    def __init__(
        self,
        events: Generator[Event, None, None],
        text_stream: TextStream | None,
        stop_strings: StopStrings | None,
    ):
        self.generation: Generation | None = None
        self.has_text = text_stream is not None
        self._events = events
        self._pieces = self._decode(text_stream, stop_strings)

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> Delta:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what is left of the request."""
        self._pieces.close()
        self._events.close()

    def _decode(self, text_stream: TextStream | None, stop_strings: StopStrings | None) -> Generator[Delta, None, None]:
        pieces: list[Delta] = []
        for event in self._events:
            if not isinstance(event, Report):
                text = _text(event.token_ids, text_stream, stop_strings) if text_stream else ""
                pieces.append(Delta(text, event.token_ids, event.logprobs, event.found_by))
                yield pieces[-1]
                continue
            if text_stream and event.finish_reason != "stop" and (rest := text_stream.finish()):
                pieces.append(Delta(rest, []))
                yield pieces[-1]
            logprobs = [value for piece in pieces for value in piece.logprobs or ()]
            self.generation = Generation(
                text="".join(piece.text for piece in pieces),
                token_ids=[token for piece in pieces for token in piece.token_ids],
                steps=event.num_steps,
                step_tokens=event.step_tokens,
                seconds=event.seconds,
                finish_reason=event.finish_reason,
                seed=event.seed,
                logprobs=logprobs or None,
                prefill_seconds=event.prefill_seconds,
                times=event.times,
                exchange_bytes=event.exchange_bytes,
                counts=event.counts,
                pool=event.pool,
                losses=event.losses,
            )


def _text(token_ids: Sequence[int], text_stream: TextStream, stop_strings: StopStrings | None) -> str:
    """The text of a run, without what stands behind a stop string inside the last token."""
    if stop_strings is None:
        return text_stream.add(token_ids)
    text = ""
    for token in token_ids:
        added = text_stream.add([token])
        num_behind = stop_strings.add(token)
        if num_behind is not None:
            added += text_stream.finish()
        text += added[: max(0, len(added) - (num_behind or 0))]
    return text
