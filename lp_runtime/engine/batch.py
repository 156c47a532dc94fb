"""Requests that a replica decodes together: they join between two steps, and leave as they end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass

from lp_runtime.engine.delivery import Delivery
from lp_runtime.engine.sequence import Sequence
from lp_runtime.errors import LookaheadError
from lp_runtime.lookahead.state import Stop
from lp_runtime.request.output import Event, StepOutput
from lp_runtime.request.request import Request


def never_cancel() -> bool:
    """Default cancellation check: the request is never cancelled."""
    return False


@dataclass(frozen=True)
class Arrival:
    """A request that joins a batch.

    Attributes:
        key: identifies the request among those of the batch.
        request: what to decode.
        stop: a condition beyond the request's own, see DecodingState; None for none.
        should_cancel: asked once a step, and between chunks of the prompt.
    """

    key: Hashable
    request: Request
    stop: Stop | None = None
    should_cancel: Callable[[], bool] = never_cancel


class Batch:
    """The sequences that a replica decodes together, by key.

    Args:
        close: releases what a sequence holds.

    Attributes:
        running: sequences whose prompts are cached.
        prefilling: sequences whose prompts are being fed, with their chunks.
        delivery: (key, event) pairs on their way to the caller.
    """

    def __init__(self, close: Callable[[Sequence], None]):
        self._close = close
        self.running: dict[Hashable, Sequence] = {}
        self.prefilling: dict[Hashable, tuple[Sequence, Generator[None, None, StepOutput | None]]] = {}
        self.delivery: Delivery[tuple[Hashable, Event | LookaheadError]] = Delivery()

    def prefill_chunk(self) -> bool:
        """Feed one chunk of the prompt whose turn it is; return whether that prompt's prefill has ended."""
        key = next(iter(self.prefilling))
        sequence, chunks = self.prefilling[key] = self.prefilling.pop(key)  # the others are next
        try:
            next(chunks)
        except (StopIteration, LookaheadError) as end:
            del self.prefilling[key]
            self.running[key] = sequence
            self.take(key, end.value if isinstance(end, StopIteration) else end)
            return True
        return False

    def take(self, key: Hashable, output: StepOutput | LookaheadError | None) -> None:
        """Queue what a step brought for a running sequence, and close the sequence if it has ended."""
        if output is not None:
            self.delivery.add((key, output))
        if isinstance(output, LookaheadError):
            self._close(self.running.pop(key))
        elif self.running[key].is_finished:
            sequence = self.running.pop(key)
            self._close(sequence)
            self.delivery.add((key, sequence.report()))

    def close(self) -> None:
        """Close all sequences."""
        for sequence in (*self.running.values(), *(sequence for sequence, _ in self.prefilling.values())):
            self._close(sequence)
