"""Replicas in processes of their own, led by the driver: it forms their groups, and forms them anew when one is lost.

Every replica holds the whole model, and those of a group the whole decoding state, so what a lost one knew is known to
the others: they form a smaller group and take the request up behind the last token that any of them has committed. The
lost one is started again. In the same way a request is moved to more or fewer replicas: it is paused between two steps,
and taken up by another group. The driver is never inside a step.

One thread listens to all replicas; every request is led by a thread of its caller's.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace

from lp_runtime.config import RuntimeConfig
from lp_runtime.decoding import Event, Report, Request, Run
from lp_runtime.errors import LaunchError, ReplicaError, unforeseen_as
from lp_runtime.launchers.allotment import Allotment
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.messages import (
    CANCEL,
    PING,
    PONG,
    Broken,
    Decode,
    Failed,
    Finished,
    Join,
    Joined,
    Loaded,
    Progress,
    Refused,
    Streamed,
    first_cause,
)
from lp_runtime.parallel.group import ReplicaContext

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a replica may take to answer a ping: a thread of its own answers
GRACE = 0.5  # seconds in which a failure's cause may arrive after its consequence
LISTEN_SECONDS = 0.1  # after which a replica that was started meanwhile is listened to
MOST_FRUITLESS = 2  # times that a request may lose all its replicas without a token in between
SHORTEST = 1e-3  # seconds that are left of a request's time at least

Group = tuple[int, ...]  # members, rank 0 first


@dataclass(frozen=True)
class Place:
    """Where a replica is: which of the GPUs it sees is its own, and how many replicas share its machine."""

    device_index: int
    num_local: int


@dataclass(frozen=True)
class Lost:
    """A replica is lost, and why."""

    reason: str


@dataclass(frozen=True)
class Inbox:
    """What the members of a group answer to one order; `lives` tells which of a replica's processes was meant."""

    order: int
    members: Group
    messages: queue.SimpleQueue
    lives: dict[int, int]


@dataclass(frozen=True)
class Attempt:
    """How far a group has come with a request.

    Attributes:
        progress: what each replica that is left has committed.
        report: if the group has not been broken.
        is_paused: whether it was told to stop, because other replicas were wanted.
    """

    progress: dict[int, Progress]
    report: Report | None
    is_paused: bool


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
        self._restarts = dict.fromkeys(range(self.num_replicas), 0)
        self._lives = dict.fromkeys(range(self.num_replicas), 0)  # processes that each has lost
        for index in range(self.num_replicas):
            self._loading.add(index)
            self._launch(index)
        self._listener = threading.Thread(target=self._listen, name="lp-team", daemon=True)
        self._listener.start()
        self._await_start(config.launcher.start_timeout)
        group = self._form(self._ready)
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
                    self._lose(index, message.message, life)
            else:
                order = getattr(message, "order", None)
                for inbox in self._inboxes.values():
                    if index in inbox.members and (message == PONG or order == inbox.order):
                        inbox.messages.put((index, message))
            self._changed.notify_all()

    def _lose(self, index: int, reason: str, life: int) -> None:
        """A replica is lost: end it, start it again if it may be, and tell those who wait for it. Once each life."""
        with self._changed:
            if life != self._lives[index]:
                return
            self._lives[index] += 1
            self._losses[index] = reason
            self._ready.discard(index)
            self._loading.discard(index)
            self._disband(self._joined.get(index, ()))
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

    def _disband(self, group: Iterable[int]) -> None:
        """A group is none any more."""
        with self._changed:
            for index in group:
                self._joined.pop(index, None)

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

    def _why(self) -> str:
        return "; ".join(f"replica {index}: {reason}" for index, reason in sorted(self._losses.items()))

    # Groups.

    @contextlib.contextmanager
    def _ordered(self, members: Group) -> Iterator[Inbox]:
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

    def _form(self, members: Iterable[int]) -> Group | None:
        """Form a group of replicas, if they are not one; those that are lost on the way are left out.

        Returns:
            the group; None if none of them is left.

        Raises:
            LookaheadError: if the replicas refuse to, or do not reach one another.
        """
        wanted = set(members)
        for _ in range(2 * self.num_replicas + 1):
            with self._changed:
                wanted &= self._ready
                group = tuple(sorted(wanted))
                if not group or all(self._joined.get(index) == group for index in group):
                    return group or None
                for index in group:
                    self._disband(self._joined.get(index, ()))
                life = self._lives[group[0]]
            where = self._meeting_place(group[0])
            if where is None:
                self._lose(group[0], "it cannot be reached", life)
                continue
            with self._ordered(group) as inbox:
                for rank, index in enumerate(group):
                    place = self._place(index)
                    context = ReplicaContext(
                        rank, len(group), place.device_index, place.num_local, *where, attempt=inbox.order
                    )
                    self._order_one(inbox, index, Join(inbox.order, context))
                infos = {}
                for index, message in self._answers(inbox, set(group)):
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
        raise ReplicaError(f"no group could be formed ({self._why() or 'the replicas do not reach one another'})")

    def _order_one(self, inbox: Inbox, index: int, message: object) -> None:
        """Give a member its order, unless it has been lost since; a process that came after it must not get it."""
        with self._changed:
            is_there = index in self._ready and self._lives[index] == inbox.lives[index]
        if is_there:
            self._send(index, message)

    def _answers(self, inbox: Inbox, waiting: set[int]) -> Iterator[tuple[int, object]]:
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
                    self._lose(index, reason, inbox.lives[index])
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
                raise ReplicaError(f"no replica is left ({self._why()})")
            allotment = Allotment(self._ready)
        yield from self._lead(request, allotment)

    def run_on(self, request: Request, allotment: Allotment) -> Generator[Event, None, None]:
        """Decode a request on some replicas. Several requests may be, on different replicas, each in a thread of its
        own. Closing the iterator early cancels the request.

        Raises:
            ReplicaError: if all its replicas are lost and it gets no others, or the launcher is closed.
        """
        if self._is_closed:
            raise ReplicaError("the runtime is closed")
        with unforeseen_as(ReplicaError, "decoding failed"):
            yield from self._lead(request, allotment)

    def _lead(self, request: Request, allotment: Allotment) -> Generator[Event, None, None]:
        started = time.monotonic()
        told: list[int] = []
        num_steps = num_lost = num_fruitless = 0
        is_whole = True
        while True:
            members = allotment.settle() or allotment.refill()
            group = self._form(members) or ()
            allotment.lose(lost := members - set(group))
            num_lost += len(lost)
            if not group:
                if members:
                    continue
                raise ReplicaError(f"all replicas were lost while decoding, after {len(told)} tokens ({self._why()})")
            left = request.max_time
            if left is not None:
                left = max(SHORTEST, left - (time.monotonic() - started))
            part = replace(request, committed=tuple(told), max_time=left)
            num_told = len(told)
            attempt = yield from self._attempt(part, told, group, allotment)
            lost = set(group) - set(attempt.progress)
            allotment.lose(lost)
            num_lost += len(lost)
            report = attempt.report
            if report is not None and not (attempt.is_paused and report.finish_reason == "cancelled"):
                report = replace(report, num_steps=report.num_steps + num_steps, losses=num_lost)
                yield report if is_whole else replace(report, seconds=time.monotonic() - started)
                return
            is_whole = False
            # A request that ends every replica it meets is not to end them all.
            num_fruitless = 0 if attempt.progress or len(told) > num_told else num_fruitless + 1
            if num_fruitless == MOST_FRUITLESS:
                raise ReplicaError(f"all replicas were lost while decoding, after {len(told)} tokens ({self._why()})")
            num_steps += max((progress.num_steps for progress in attempt.progress.values()), default=0)

    def _attempt(
        self, request: Request, told: list[int], group: Group, allotment: Allotment
    ) -> Generator[Event, None, Attempt]:
        """Have a group decode a request: to its end, to the loss of a replica, or until other replicas are wanted.

        Args:
            told: new tokens that were yielded so far; what is yielded is added.
        """
        done: dict[int, Finished] = {}
        broken: dict[int, Broken] = {}
        refusal: Refused | None = None
        is_paused = False
        with self._ordered(group) as inbox:
            waiting = set(group)
            for index in group:
                self._order_one(inbox, index, Decode(inbox.order, request))
            try:
                for index, message in self._answers(inbox, waiting):
                    if isinstance(message, Streamed):
                        told += message.run.token_ids
                        yield message.run
                        if not is_paused and allotment.wanted != set(group):
                            is_paused = True
                            self._send(group[0], CANCEL)
                    elif isinstance(message, Finished):
                        done[index] = message
                    elif isinstance(message, Broken):
                        broken[index] = message
                    elif isinstance(message, Refused):
                        refusal = message
            except (GeneratorExit, KeyboardInterrupt):  # the caller stopped early
                if not self._is_closed:
                    self._cancel(inbox, waiting)
                raise
        if broken or refusal:
            self._disband(group)
        if refusal is not None:
            raise refusal.kind(refusal.message)
        self._drop_suspects(inbox, broken)
        progress = {index: message.progress for index, message in (done | broken).items()}
        if progress:
            yield from self._tell_rest(request, told, max(progress.values(), key=lambda each: len(each.token_ids)))
        report = next((done[index].report for index in group if index in done), None)
        return Attempt(progress, report, is_paused)

    def _cancel(self, inbox: Inbox, waiting: set[int]) -> None:
        """End what members are decoding, and wait until they have."""
        for index in waiting:
            self._send(index, CANCEL)
        for _, message in self._answers(inbox, waiting):
            if not isinstance(message, Streamed | Finished):
                self._disband(inbox.members)

    def _drop_suspects(self, inbox: Inbox, broken: dict[int, Broken]) -> None:
        """Where digests differ, most replicas are right, or, where there is no telling, the first of them."""
        digests = next((message.digests for message in broken.values() if message.digests), None)
        if digests is None:
            return
        right = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        for index, digest in zip(inbox.members, digests, strict=True):
            if digest != right and broken.pop(index, None):
                self._lose(index, "its state has parted from the others'", inbox.lives[index])

    @staticmethod
    def _tell_rest(request: Request, told: list[int], best: Progress) -> Generator[Event, None, None]:
        """What a replica has committed that the caller was not told: rank 0 was lost before it said so."""
        known = len(told) - len(request.committed)
        rest = best.token_ids[known:]
        if rest:
            told += rest
            yield Run(rest, best.logprobs[known:] if request.logprobs else None)

    def _close(self) -> None:
        listener = getattr(self, "_listener", None)
        if listener is not None:
            listener.join()
        self._end()
