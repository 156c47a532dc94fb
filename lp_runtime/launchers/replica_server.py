"""A replica's side of the conversation with its driver: load, then carry out orders until the driver is gone."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.engine.output import Event, Report
from lp_runtime.engine.replica import LoadedModel, Replica, join_group, load_replica
from lp_runtime.engine.request import Request
from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, StateMismatchError
from lp_runtime.launchers.messages import (
    PING,
    PONG,
    Broken,
    Cancel,
    Decode,
    Failed,
    Finished,
    Join,
    Joined,
    Loaded,
    Prefill,
    Prefilled,
    Progress,
    Refused,
    Streamed,
)

Order = Join | Decode | Prefill
STEP_TOKENS = 1200  # that a step may feed: as many as are measured, and some that are pending


class ReplicaServer:
    """Carries out a driver's orders, one after another; those to decode together, where it is alone in its group.

    Args:
        config: the runtime's.
        device_index, num_local: see ReplicaContext.
        send: says something to the driver; called from several threads.
    """

    def __init__(self, config: RuntimeConfig, device_index: int, num_local: int, send: Callable[[object], None]):
        self._config = config
        self._place = (device_index, num_local)
        self._send = send
        self._orders = _Orders()
        self._group = contextlib.ExitStack()
        self._replica: Replica | None = None

    def post(self, message: object) -> None:
        """Take a message of the driver's; never waits. Called from another thread than `run`."""
        if message == PING:
            self._send(PONG)
        elif isinstance(message, Cancel):
            self._orders.cancel(message.order)
        else:
            self._orders.put(message)

    def run(self) -> None:
        """Load the model, then carry out orders. Returns when this replica cannot go on; the driver has been told."""
        try:
            loaded = load_replica(self._config, *self._place, owns_process=True)
            self._send(Loaded(loaded.info))
            while True:
                order = self._orders.get()
                if isinstance(order, Join):
                    self._join(loaded, order)
                elif isinstance(order, Prefill):
                    self._warm(loaded, order)
                elif self._replica is not None and self._replica.supports_batching:
                    self._decode_together(order)
                else:
                    self._decode(order)
        except Exception as error:  # whatever it is; said before the group is left, which may wait for peers
            self._send(Failed.from_error(error))

    def _leave(self) -> None:
        self._replica = None
        with contextlib.suppress(Exception):  # a broken group may not even end well
            self._group.close()

    def _join(self, loaded: LoadedModel, order: Join) -> None:
        self._leave()
        self._group = contextlib.ExitStack()
        group = join_group(self._config, loaded, order.context, is_abandoned=self._orders.are_there)
        try:
            self._replica = self._group.enter_context(group)
        except (ReplicaError, LaunchError) as error:  # peers that did not come, or went
            self._send(Broken(order.order, Progress(), str(error)))
            self._leave()
        except LookaheadError as error:
            self._send(Refused(order.order, str(error), type(error)))
            self._leave()
        else:
            self._send(Joined(order.order, self._replica.info))
        self._orders.end(order.order)

    def _warm(self, loaded: LoadedModel, order: Prefill) -> None:
        request, model = order.request, loaded.model
        capacity = len(request.prompt_ids) + request.max_new_tokens + STEP_TOKENS
        text = model.texts.take(model.capacity_for(capacity), (*request.prompt_ids, *request.committed))
        with model.feeding(text):
            for _ in model.resume(request.prompt_ids, request.committed, capacity):
                if self._orders.is_cancelled(order.order):
                    break
        model.texts.give(text)
        self._send(Prefilled(order.order))
        self._orders.end(order.order)

    def _decode(self, order: Decode) -> None:
        answer = _Answer(order.order, self._send, leads=False)
        if self._replica is None:  # it left on its own, after what the driver had not heard of yet
            self._send(Broken(order.order, answer.progress, "this replica is in no group"))
            self._orders.end(order.order)
            return
        answer.leads = self._replica.context.rank == 0
        try:
            for event in self._replica.decode(order.request, lambda: self._orders.is_cancelled(order.order)):
                answer.tell(event)
        except ReplicaError as error:
            digests = error.digests if isinstance(error, StateMismatchError) else None
            self._send(Broken(order.order, answer.progress, str(error), digests))
            self._leave()
        except LookaheadError as error:
            answer.tell(error)
            self._leave()
        self._orders.end(order.order)

    def _decode_together(self, first: Decode) -> None:
        """Decode this request, and those that are ordered meanwhile; until none is left."""
        answers: dict[int, _Answer] = {}
        coming: list[Decode] = [first]

        def arrivals() -> Iterator[tuple[int, Request, Callable[[], bool]]]:
            while (order := coming.pop() if coming else self._orders.get_decode()) is not None:
                number = order.order
                answers[number] = _Answer(number, self._send, leads=True)
                yield number, order.request, lambda number=number: self._orders.is_cancelled(number)

        for number, event in self._replica.decode_batch(arrivals):
            answers[number].tell(event)
            if isinstance(event, Report | LookaheadError):
                del answers[number]
                self._orders.end(number)


class _Answer:
    """What a replica says to an order to decode."""

    def __init__(self, order: int, send: Callable[[object], None], leads: bool):
        self.progress = Progress()
        self.leads = leads
        self._order, self._send = order, send

    def tell(self, event: Event | LookaheadError) -> None:
        if isinstance(event, LookaheadError):
            self._send(Refused(self._order, str(event), type(event)))
        elif isinstance(event, Report):
            self._send(Finished(self._order, self.progress, event))
        else:
            self.progress = self.progress.after(event)
            if self.leads:
                self._send(Streamed(self._order, event))


class _Orders:
    """The driver's orders, in the order in which they came, and which of them were cancelled. For two threads."""

    def __init__(self) -> None:
        self._orders: queue.Queue[Order] = queue.Queue()
        self._next: Order | None = None  # taken from the queue, and not carried out yet
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()

    def put(self, order: Order) -> None:
        with self._lock:
            self._open.add(order.order)
        self._orders.put(order)

    def are_there(self) -> bool:
        """Whether any waits to be carried out."""
        return self._next is not None or not self._orders.empty()

    def get(self) -> Order:
        """The next one; waits for it."""
        order, self._next = self._next, None
        return self._orders.get() if order is None else order

    def get_decode(self) -> Decode | None:
        """The next one if it is there and is to decode; any other stays the next."""
        if self._next is None:
            with contextlib.suppress(queue.Empty):
                self._next = self._orders.get_nowait()
        if not isinstance(self._next, Decode):
            return None
        return self.get()

    def cancel(self, order: int) -> None:
        """From now on this one is cancelled; nothing if it has ended."""
        with self._lock:
            if order in self._open:
                self._cancelled.add(order)

    def is_cancelled(self, order: int) -> bool:
        return order in self._cancelled

    def end(self, order: int) -> None:
        """This one has been carried out."""
        with self._lock:
            self._open.discard(order)
            self._cancelled.discard(order)
