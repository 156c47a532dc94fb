"""Continuous batching on one replica: requests join between two steps, and leave as they end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass

from lp_runtime.engine.delivery import Delivery
from lp_runtime.engine.running_request import RunningRequest
from lp_runtime.errors import LookaheadError, RequestMemoryError
from lp_runtime.lookahead.state import Stop
from lp_runtime.request.output import Event, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.utils.callables import never


@dataclass(frozen=True)
class Arrival:
    """A request that joins a batch.

    Attributes:
        stop: a stop condition in addition to the request's, see DecodingState; None for none.
        should_cancel: asked when it arrives, once a step, and between chunks of the prompt.
    """

    key: Hashable
    request: Request
    stop: Stop | None = None
    should_cancel: Callable[[], bool] = never


class Batch:
    """The requests that a replica decodes together, by key.

    Attributes:
        running: requests whose prompts are cached.
        prefilling: requests whose prompts are being fed, with the generators that feed them.
        delivery: (key, event) pairs on their way to the caller.
    """

    def __init__(self, close: Callable[[RunningRequest, bool], None]):
        self._close = close
        self.running: dict[Hashable, RunningRequest] = {}
        self.prefilling: dict[Hashable, tuple[RunningRequest, Generator[None, None, StepOutput | None]]] = {}
        self.delivery: Delivery[tuple[Hashable, Event | LookaheadError]] = Delivery()

    @property
    def is_deferred(self) -> bool:
        """Whether outputs are delivered after the next step's launch."""
        return bool(self.running) and self.delivery.is_deferred

    def prefill_chunk(self) -> bool:
        """Feed one chunk of the next prompt in turn; return whether that prompt's prefill has ended."""
        key = next(iter(self.prefilling))
        running, chunks = self.prefilling[key] = self.prefilling.pop(key)  # to the end of the queue
        try:
            next(chunks)
        except (StopIteration, LookaheadError) as end:
            del self.prefilling[key]
            self.running[key] = running
            self.handle_output(key, end.value if isinstance(end, StopIteration) else end)
            return True
        return False

    def handle_output(self, key: Hashable, output: StepOutput | LookaheadError | None) -> None:
        """Queue the output of a running request's step, and close the request if it has ended."""
        if output is not None:
            self.delivery.add((key, output))
        if isinstance(output, LookaheadError):
            self._close(self.running.pop(key), isinstance(output, RequestMemoryError))
        elif self.running[key].is_finished:
            running = self.running.pop(key)
            self._close(running, False)
            self.delivery.add((key, running.report()))

    def close(self) -> None:
        for running in (*self.running.values(), *(running for running, _ in self.prefilling.values())):
            self._close(running, False)
