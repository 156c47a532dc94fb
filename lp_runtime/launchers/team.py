"""Replicas in processes of their own, led by the driver: it forms their groups, and forms them anew when one is lost.

Every replica holds the whole model, and those of a group the whole decoding state, so what a lost one knew is known to
the others: they form a smaller group and take the request up behind the last token that any of them has committed. The
lost one is started again. In the same way a request is moved to more or fewer replicas: it is paused between two steps,
and taken up by another group. The driver is never inside a step.

One thread listens to all replicas; every request is led by a thread of its caller's (leading.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.engine.output import Event
from lp_runtime.engine.request import Request
from lp_runtime.errors import LaunchError, ReplicaError, unforeseen_as
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.inbox import Group, Inbox, Lost
from lp_runtime.launchers.lease import ReplicaLease
from lp_runtime.launchers.messages import (
    PING,
    PONG,
    Broken,
    Failed,
    Join,
    Joined,
    Loaded,
    Refused,
    Streamed,
    first_cause,
)
from lp_runtime.launchers.request_driver import RequestDriver

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a replica may take to answer a ping: a thread of its own answers
GRACE = 0.5  # seconds in which a failure's cause may arrive after its consequence
LISTEN_SECONDS = 0.1  # after which a replica that was started meanwhile is listened to


@dataclass(frozen=True)
class Place:
    """Where a replica is: which of the GPUs it sees is its own, and how many replicas share its machine."""

    device_index: int
    num_local: int


class TeamLauncher(Launcher):
    """What launchers with processes of their own have in common. A subclass starts and reaches the processes.

    Replicas are known by an index, 0 <= index < num_replicas; one that is started again keeps it.
    """

    outlives_failures = True

    def _start(self, config: RuntimeConfig) -> None:
        """Start all replicas and form their group.

        Raises:
            LookaheadError: if any of them fails.
        """
        self._config = config
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._order = 0
        self._inboxes: dict[int, Inbox] = {}
        self._joined: dict[int, Group] = {}  # the group that each replica is in
        self._loading: set[int] = set()
        self._ready: set[int] = set()  # loaded, and not known to be lost
        self._start_failures: dict[int, Failed] | None = {}  # None once all have started
        self._losses: dict[int, str] = {}  # why each replica was lost last
        self._forming = [threading.Lock() for _ in range(self.num_replicas)]  # held while a replica's group is formed
        self._restarts = dict.fromkeys(range(self.num_replicas), 0)
        self._lives = dict.fromkeys(range(self.num_replicas), 0)  # processes that each has lost
        for index in range(self.num_replicas):
            self._loading.add(index)
            self._launch(index)
        self._listener = threading.Thread(target=self._listen, name="lp-team", daemon=True)
        self._listener.start()
        self._await_start(config.launcher.start_timeout)
        group = self.form(self._ready)
        if group is None or len(group) < self.num_replicas:
            index, reason = next(iter(self._losses.items()))
            raise LaunchError(f"rank {index} failed at start: {reason}")

    def _await_start(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._start_failures or not self._loading, timeout)
            if self._start_failures:  # of all that fail within GRACE, the failure that explains the rest
                self._changed.wait_for(lambda: len(self._start_failures) == self.num_replicas, GRACE)
                index = first_cause(self._start_failures)
                failed = self._start_failures[index]
                raise (failed.kind or LaunchError)(f"rank {index} failed at start: {failed.message}")
            if self._loading:
                raise LaunchError(
                    f"rank {min(self._loading)} was not ready within launcher.start_timeout={timeout:g} seconds"
                )
            self._start_failures = None

    # What a subclass must have.

    @abstractmethod
    def _launch(self, index: int) -> None:
        """Start a replica's process; it says Loaded, or Failed, in its time."""

    @abstractmethod
    def _send(self, index: int, message: object) -> None:
        """Say something to a replica. That it is dead shows when it is listened to."""

    @abstractmethod
    def _receive(self, timeout: float) -> list[tuple[int, object]]:
        """(index, message) of everything that has been said within a time; waits for the first. A process that has
        ended says Failed, once. Called by one thread only."""

    @abstractmethod
    def _kill(self, index: int) -> None:
        """End a replica's process, whatever it is doing; it says nothing any more."""

    @abstractmethod
    def _meeting_place(self, leader: int) -> tuple[str, int] | None:
        """Host and port of a store for a group whose rank 0 is `leader`; None if that cannot be reached."""

    @abstractmethod
    def _place(self, index: int) -> Place:
        """Where a replica is."""

    @abstractmethod
    def _end(self) -> None:
        """End all processes; nobody listens any more."""

    # Replicas come and go.

    def _listen(self) -> None:
        while not self._is_closed:
            lives = dict(self._lives)
            try:
                for index, message in self._receive(LISTEN_SECONDS):
                    self._route(index, message, lives[index])
            except Exception:  # without this thread nothing goes on
                if not self._is_closed:
                    log.exception("listening to replicas failed; going on")
                    time.sleep(LISTEN_SECONDS)

    def _route(self, index: int, message: object, life: int) -> None:
        """Take what a replica says to whom it concerns."""
        with self._changed:
            if isinstance(message, Loaded):
                self._ready.add(index)
                self._loading.discard(index)
            elif isinstance(message, Failed):
                if self._start_failures is not None:
                    self._start_failures.setdefault(index, message)  # its end comes after its reason
                else:
                    self.lose(index, message.message, life)
            else:
                order = getattr(message, "order", None)
                for inbox in self._inboxes.values():
                    if index in inbox.members and (message == PONG or order == inbox.order):
                        inbox.messages.put((index, message))
            self._changed.notify_all()

    def lose(self, index: int, reason: str, life: int) -> None:
        """A replica is lost: end it, start it again if it may be, and tell those who wait for it. Once each life."""
        with self._changed:
            if life != self._lives[index]:
                return
            self._lives[index] += 1
            self._losses[index] = reason
            self._ready.discard(index)
            self._loading.discard(index)
            self.disband(self._joined.get(index, ()))
            self._kill(index)
            again = self._restarts[index] < self._config.failure.restarts and not self._is_closed
            log.warning("replica %d was lost (%s)%s", index, reason, "; it is started again" if again else "")
            if again:
                self._restarts[index] += 1
                try:
                    self._launch(index)
                    self._loading.add(index)
                except Exception as error:  # no memory, no file descriptors, no node
                    log.warning("replica %d cannot be started again: %s", index, error)
            for inbox in self._inboxes.values():
                if index in inbox.members:
                    inbox.messages.put((index, Lost(reason)))
            self._changed.notify_all()

    def disband(self, group: Iterable[int]) -> None:
        """A group is none any more."""
        with self._changed:
            for index in group:
                self._joined.pop(index, None)

    def tell(self, index: int, message: object) -> None:
        """Say something to a replica, whatever it is doing."""
        self._send(index, message)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def ready(self) -> frozenset[int]:
        """Replicas that are there, as far as is known."""
        with self._changed:
            return frozenset(self._ready)

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    @property
    def num_loading(self) -> int:
        """Replicas that are being started again."""
        with self._changed:
            return len(self._loading)

    def why_lost(self) -> str:
        """Why each replica was lost last."""
        return "; ".join(f"replica {index}: {reason}" for index, reason in sorted(self._losses.items()))

    # Groups.

    @contextlib.contextmanager
    def ordered(self, members: Group) -> Iterator[Inbox]:
        """A new order, and the inbox for what members answer to it."""
        with self._changed:
            self._order += 1
            inbox = Inbox(self._order, members, queue.SimpleQueue(), dict(self._lives))
            self._inboxes[inbox.order] = inbox
            for index in set(members) - self._ready:  # lost before they could be waited for
                inbox.messages.put((index, Lost(self._losses.get(index, "it is not there"))))
        try:
            yield inbox
        finally:
            with self._changed:
                del self._inboxes[inbox.order]

    def form(self, members: Iterable[int]) -> Group | None:
        """Form a group of replicas, if they are not one; those that are lost on the way are left out.

        Returns:
            the group; None if none of them is left.

        Raises:
            LookaheadError: if the replicas refuse to, or do not reach one another.
        """
        wanted = set(members)
        with contextlib.ExitStack() as held:
            for index in sorted(wanted):  # requests that share a replica must not form its group twice
                held.enter_context(self._forming[index])
            return self._form(wanted)

    def _form(self, wanted: set[int]) -> Group | None:
        for _ in range(2 * self.num_replicas + 1):
            with self._changed:
                wanted &= self._ready
                group = tuple(sorted(wanted))
                if not group or all(self._joined.get(index) == group for index in group):
                    return group or None
                for index in group:
                    self.disband(self._joined.get(index, ()))
                life = self._lives[group[0]]
            where = self._meeting_place(group[0])
            if where is None:
                self.lose(group[0], "it cannot be reached", life)
                continue
            with self.ordered(group) as inbox:
                for rank, index in enumerate(group):
                    place = self._place(index)
                    context = ReplicaContext(
                        rank, len(group), place.device_index, place.num_local, *where, attempt=inbox.order
                    )
                    self.order_one(inbox, index, Join(inbox.order, context))
                infos = {}
                for index, message in self.answers(inbox, set(group)):
                    if isinstance(message, Refused):
                        raise message.kind(message.message)
                    if isinstance(message, Joined):
                        infos[index] = message.info
                    elif isinstance(message, Lost):
                        break  # the others need not wait for it: the next order ends that
            if len(infos) == len(group):
                with self._changed:
                    self.info = infos[group[0]]
                    self._joined |= dict.fromkeys(group, group)
        raise ReplicaError(f"no group could be formed ({self.why_lost() or 'the replicas do not reach one another'})")

    def order_one(self, inbox: Inbox, index: int, message: object) -> None:
        """Give a member its order, unless it has been lost since; a process that came after it must not get it."""
        with self._changed:
            is_there = index in self._ready and self._lives[index] == inbox.lives[index]
        if is_there:
            self._send(index, message)

    def answers(self, inbox: Inbox, waiting: set[int]) -> Iterator[tuple[int, object]]:
        """What members answer to an order, each until its last word, or Lost.

        Whoever keeps silent is asked for a sign of life: after failure.timeout, or as soon as something went wrong.
        From then on the others have failure.timeout to come to their end.

        Args:
            waiting: members that have not had their last word; they leave it as they have.
        """
        limit = self._config.failure.timeout
        asked: set[int] = set()
        deadline = time.monotonic() + limit
        last = None  # when those must have ended that are left, once something went wrong
        while waiting:
            try:
                index, message = inbox.messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                now = time.monotonic()
                silent = waiting & asked if last is None or now < last else set(waiting)
                for index in sorted(silent):
                    reason = "it did not answer" if index in asked else f"it did not end within {limit:g} s"
                    self.lose(index, reason, inbox.lives[index])
                asked = waiting - silent
                for index in asked:
                    self._send(index, PING)
                deadline = now + (0.0 if silent else PATIENCE)
                continue
            asked.discard(index)
            if message == PONG or index not in waiting:
                continue
            if not isinstance(message, Streamed):
                waiting.discard(index)
            if isinstance(message, Lost | Broken | Refused):
                if last is None:
                    last = time.monotonic() + limit
                    deadline = time.monotonic()
            elif last is None:
                deadline = time.monotonic() + limit
                asked.clear()
            yield index, message

    # Requests.

    def _run(self, request: Request) -> Generator[Event, None, None]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or not self._loading, self._config.launcher.start_timeout)
            if not self._ready:
                raise ReplicaError(f"no replica is left ({self.why_lost()})")
            lease = ReplicaLease(self._ready)
        yield from RequestDriver(self, request, lease).run()

    def run_on(self, request: Request, lease: ReplicaLease) -> Generator[Event, None, None]:
        """Decode a request on some replicas. Several requests may be, on different replicas, each in a thread of its
        own. Closing the iterator early cancels the request.

        Raises:
            ReplicaError: if all its replicas are lost and it gets no others, or the launcher is closed.
        """
        if self._is_closed:
            raise ReplicaError("the runtime is closed")
        with unforeseen_as(ReplicaError, "decoding failed"):
            yield from RequestDriver(self, request, lease).run()

    def _close(self) -> None:
        listener = getattr(self, "_listener", None)
        if listener is not None:
            listener.join()
        self._end()
