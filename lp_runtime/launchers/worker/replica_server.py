"""Main loops of a replica's processes: shard 0, which carries out the driver's orders, and the others."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.store import PeersMissingError, StoreConnection
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.batch import Arrival
from lp_runtime.errors import (
    LaunchError,
    LookaheadError,
    ReplicaError,
    RequestError,
    RequestMemoryError,
    ShardError,
    StateMismatchError,
    as_known_kind,
)
from lp_runtime.launchers.wire.messages import (
    PING,
    PONG,
    Abort,
    Cancel,
    Decode,
    Failed,
    Finished,
    GroupBroken,
    Join,
    Joined,
    ModelLoaded,
    Order,
    Prefill,
    Prefilled,
    Progress,
    Refused,
    Streamed,
)
from lp_runtime.launchers.wire.sealed_request import open_request
from lp_runtime.launchers.worker.process_host import Placement
from lp_runtime.model.kv_cache.slots import STEP_SPACE_TOKENS, initial_text_tokens
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import read_for_resume
from lp_runtime.replica.loaded_model import LoadedModel, load_follower, load_replica
from lp_runtime.replica.replica import Replica, join_group
from lp_runtime.request.output import Event, Report
from lp_runtime.request.request import Request
from lp_runtime.utils.memory import out_of_memory_as


class ReplicaServer:
    """Carries out a driver's orders one after another.

    If the replica is alone in its group, it decodes several requests as one batch. `send` sends a message to the
    driver, and is called from several threads.
    """

    def __init__(self, config: RuntimeConfig, place: Placement, send: Callable[[object], None]):
        self._config = config
        self._place = place
        self._send = send
        self._orders = _OrderQueue()
        self._membership = contextlib.ExitStack()  # leaves the current group when closed
        self._replica: Replica | None = None  # None if it is in no group
        self._store = StoreConnection()
        self._grouping = threading.Lock()  # held while `_group` is set or aborted, or an order ends
        self._group: Group | None = None  # the current group, set when it has formed

    def post(self, message: object) -> None:
        """Handle a message from the driver; never waits. Called from a different thread than `run`."""
        if message == PING:
            self._send(PONG)
        elif isinstance(message, Cancel):
            self._orders.cancel(message.order)
        elif isinstance(message, Abort):
            self._abort(message.order)
        else:
            assert isinstance(message, Order)
            self._orders.put(message)

    def run(self) -> None:
        """Load the model, then carry out orders. Sends Failed and returns when this replica cannot continue."""
        try:
            place = self._place
            loaded = load_replica(
                self._config,
                place.device_index,
                place.num_local,
                owns_process=True,
                owns_device=place.owns_device,
                place=place.shard,
                batches=self._config.may_batch,
            )
            self._send(ModelLoaded())
            while True:
                order = self._orders.get()
                if isinstance(order, Join):
                    self._join(loaded, order)
                elif isinstance(order, Prefill):
                    self._prefill(loaded, order)
                elif self._replica is not None and self._replica.supports_batching:
                    self._decode_batch(self._replica, order)
                else:
                    self._decode(order)
        except Exception as error:  # of any kind; sent before the group is left, which may wait for peers
            self._send(Failed.from_error(error))

    def _abort(self, order: int) -> None:
        """Make an unfinished order end as if a peer were lost."""
        with self._grouping:
            if self._orders.abort(order) and self._group is not None and self._group.transport is not None:
                self._group.transport.abort()

    def _end(self, order: int) -> None:
        """Record that an order is finished: a late Abort for it must not abort the group."""
        with self._grouping:
            self._orders.end(order)

    def _enter(self, group: Group, order: int) -> None:
        """Record the group that a Join has formed; abort it if an Abort has arrived before."""
        with self._grouping:
            self._group = group
            if self._orders.is_aborted(order) and group.transport is not None:
                group.transport.abort()

    def _leave(self) -> None:
        with self._grouping:
            self._replica = self._group = None
        with contextlib.suppress(Exception):  # leaving a broken group may fail
            self._membership.close()

    def _join(self, loaded: LoadedModel, order: Join) -> None:
        self._leave()
        self._membership = contextlib.ExitStack()
        try:
            group = join_group(
                self._config,
                replace(loaded, is_start=order.is_start),
                order.context,
                self._store.connect(order.context, order.timeout or self._config.launcher.timeout),
                is_abandoned=lambda: self._orders.has_next() or self._orders.is_aborted(order.order),
                on_formed=lambda group: self._enter(group, order.order),
                timeout=order.timeout,
            )
            self._replica = self._membership.enter_context(group)
        except (ReplicaError, LaunchError) as error:  # a peer is missing or gone
            was_present = isinstance(error.__cause__, PeersMissingError)
            self._send(GroupBroken(order.order, Progress(), str(error), was_present=was_present))
            self._leave()
        except LookaheadError as error:
            self._send(Refused(order.order, str(error), type(error)))
            self._leave()
        else:
            self._send(Joined(order.order, self._replica.info))
        self._end(order.order)

    def _prefill(self, loaded: LoadedModel, order: Prefill) -> None:
        with contextlib.suppress(RequestError), out_of_memory_as(RequestMemoryError):  # the Decode will meet them again
            self._feed(loaded.model, open_request(order.request), order.order)
        self._send(Prefilled(order.order))
        self._end(order.order)

    def _feed(self, model: ModelRunner, request: Request, order: int) -> None:
        """Prefill a request into a slot that its Decode will reuse; stops early if the order is cancelled."""
        text = initial_text_tokens(len(request.prompt_ids), len(request.committed), request.max_new_tokens)
        capacity = text + STEP_SPACE_TOKENS
        with model.slots.borrowed(capacity, (*request.prompt_ids, *request.committed)) as slot:
            try:
                read_for_resume(model, slot, request, capacity)
                for _ in model.resume(slot, request.prompt_ids, request.committed, capacity):
                    if self._orders.is_cancelled(order):
                        break
            except BaseException:  # its layers' states may be of different lengths
                model.slots.drop(slot)
                raise

    def _decode(self, order: Decode) -> None:
        if self._replica is None:  # it left the group, and the driver sent this order before it knew
            self._send(GroupBroken(order.order, Progress(), "this replica is in no group"))
            self._end(order.order)
            return
        answer = _Answer(order.order, self._send, is_leader=self._replica.group.rank == 0)
        try:
            request = open_request(order.request)
            for event in self._replica.decode(request, lambda: self._orders.is_cancelled(order.order)):
                answer.send(event)
        except ReplicaError as error:
            digests = error.digests if isinstance(error, StateMismatchError) else None
            self._send(GroupBroken(order.order, answer.progress, str(error), digests))
            self._leave()
        except LookaheadError as error:
            answer.send(error)
            self._leave()
        self._end(order.order)

    def _decode_batch(self, replica: Replica, first: Decode) -> None:
        """Decode `first` and all requests that arrive meanwhile as one batch, until none is left."""
        answers: dict[Hashable, _Answer] = {}  # by order number
        coming: list[Decode] = [first]

        def arrivals() -> Iterator[Arrival]:
            while (order := coming.pop() if coming else self._orders.get_decode()) is not None:
                number = order.order
                answer = _Answer(number, self._send, is_leader=True)
                try:
                    request = open_request(order.request)
                except RequestError as error:
                    answer.send(error)
                    self._end(number)
                    continue
                answers[number] = answer
                yield Arrival(number, request, should_cancel=partial(self._orders.is_cancelled, number))

        for number, event in replica.decode_batch(arrivals):
            answers[number].send(event)
            if isinstance(event, Report | LookaheadError):
                self._end(answers.pop(number).order)


class FollowerServer:
    """Counterpart of ReplicaServer for shards other than 0. Sends only PONG and, if it fails, Failed."""

    def __init__(self, config: RuntimeConfig, place: Placement, send: Callable[[object], None]):
        self._config = config
        self._place = place
        self._send = send

    def post(self, message: object) -> None:
        """Handle a message from the driver; see ReplicaServer."""
        assert message == PING, "followers get their orders from shard 0"
        self._send(PONG)

    def run(self) -> None:
        """Load this shard and follow shard 0. Returns when it cannot continue."""
        place = self._place
        try:
            follower = load_follower(self._config, place.device_index, place.num_local, place.shard)
            for message in follower.messages():
                raise AssertionError(f"shard 0 announced {message!r}")
        except ShardError:  # another shard is gone: it has sent the reason itself, or the driver sees its process end
            return
        except Exception as error:
            failed = Failed.from_error(error)
            named = failed.message if failed.kind else f"shard {place.shard.shard}: {failed.message}"
            self._send(replace(failed, message=named))


class _Answer:
    """Turns the engine's events into answers to one Decode. Only the leader, rank 0, streams outputs."""

    def __init__(self, order: int, send: Callable[[object], None], is_leader: bool):
        self.order = order
        self.progress = Progress()  # since the order
        self._send = send
        self._is_leader = is_leader

    def send(self, event: Event | LookaheadError) -> None:
        if isinstance(event, LookaheadError):
            self._send(Refused(self.order, str(event), type(as_known_kind(event))))
        elif isinstance(event, Report):
            self._send(Finished(self.order, self.progress, event))
        else:
            self.progress.add(event)
            if self._is_leader:
                self._send(Streamed(self.order, event))


class _OrderQueue:
    """Queue of the driver's orders, and which of them were cancelled or aborted. For two threads."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._open: set[int] = set()  # numbers of the orders that have not ended
        self._cancelled: set[int] = set()
        self._aborted: set[int] = set()
        self._changed = threading.Condition()

    def put(self, order: Order) -> None:
        with self._changed:
            self._open.add(order.order)
            self._orders.append(order)
            self._changed.notify()

    def has_next(self) -> bool:
        return bool(self._orders)

    def get(self) -> Order:
        with self._changed:
            self._changed.wait_for(self.has_next)
            return self._orders.popleft()

    def get_decode(self) -> Decode | None:
        """Remove and return the next order if it has arrived and is a Decode, else return None. Never blocks."""
        with self._changed:
            if self._orders and isinstance(order := self._orders[0], Decode):
                self._orders.popleft()
                return order
        return None

    def cancel(self, order: int) -> None:
        with self._changed:
            if order in self._open:
                self._cancelled.add(order)

    def is_cancelled(self, order: int) -> bool:
        return order in self._cancelled

    def abort(self, order: int) -> bool:
        """Mark the order with this number as aborted; return False, without effect, if it has ended."""
        with self._changed:
            if order in self._open:
                self._aborted.add(order)
            return order in self._open

    def is_aborted(self, order: int) -> bool:
        return order in self._aborted

    def end(self, order: int) -> None:
        with self._changed:
            for numbers in (self._open, self._cancelled, self._aborted):
                numbers.discard(order)
