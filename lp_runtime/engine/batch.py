"""Continuous batching on one replica: requests join between two steps, and leave as they end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass

from lp_runtime.engine.delivery import Delivery
from lp_runtime.engine.running_request import Callbacks, RunningRequest
from lp_runtime.errors import LookaheadError, RequestMemoryError
from lp_runtime.lookahead.state import Stop
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Event, Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.sampling.sampler import Sampler
from lp_runtime.utils.callables import never

KeyedEvent = tuple[Hashable, Event | LookaheadError]  # an event of the request with this key


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

    Args:
        open_request, close_request: of the engine; they acquire and release what a running request holds.

    Attributes:
        running: requests whose prompts are cached.
        prefilling: requests whose prompts are being fed, with the generators that feed them.
        delivery: (key, event) pairs on their way to the caller.
    """

    def __init__(
        self,
        model: ModelRunner,
        open_request: Callable[[Request, Callbacks, Sampler | None, Stop | None], RunningRequest],
        close_request: Callable[[RunningRequest, bool], None],
    ):
        self._model = model
        self._open, self._close = open_request, close_request
        self.running: dict[Hashable, RunningRequest] = {}
        self.prefilling: dict[Hashable, tuple[RunningRequest, Generator[None, None, StepOutput | None]]] = {}
        self.delivery: Delivery[KeyedEvent] = Delivery()

    def admit(self, arrivals: Callable[[], Iterable[Arrival]]) -> Iterator[KeyedEvent]:
        """Open the requests that have arrived; yield outputs, unless they are delivered after the next launch."""
        is_deferred = bool(self.running) and self.delivery.is_deferred
        if not is_deferred:
            yield from self.delivery.deliver()
        for arrival in arrivals():
            self._admit(arrival)
        if self.prefilling or not is_deferred:
            yield from self.delivery.deliver()

    def _admit(self, arrival: Arrival) -> None:
        if arrival.should_cancel():  # without a slot: there may be no memory for one
            self.delivery.add((arrival.key, Report.of_unstarted(arrival.request.sampling.seed)))
            return
        try:
            running = self._open(arrival.request, Callbacks(arrival.should_cancel), None, arrival.stop)
        except LookaheadError as error:
            self.delivery.add((arrival.key, error))
        else:
            self.prefilling[arrival.key] = running, running.prefill()

    def prefill_some(self) -> Iterator[KeyedEvent]:
        """Feed about one chunk of the prompts that have arrived, in turns; yield outputs that are due meanwhile."""
        num_before = self._model.num_prefilled_tokens
        while self.prefilling and self._model.num_prefilled_tokens - num_before < self._model.prefill_chunk:
            key = next(iter(self.prefilling))
            running, chunks = self.prefilling[key] = self.prefilling.pop(key)  # to the end of the queue
            try:
                next(chunks)
            except (StopIteration, LookaheadError) as end:
                del self.prefilling[key]
                self.running[key] = running
                self.handle_output(key, end.value if isinstance(end, StopIteration) else end)
                yield from self.delivery.deliver()

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
