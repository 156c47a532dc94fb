"""Pool of replicas in other processes: starts them, receives their messages, restarts lost ones.

One thread receives from all replicas and puts each answer into the inbox of its order. The thread that gave the order
reads the inbox (answers.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from lp_runtime.config.settings import FailureConfig
from lp_runtime.errors import LaunchError
from lp_runtime.launchers.wire.inbox import Inbox, InboxTable, Members, ReplicaLost
from lp_runtime.launchers.wire.messages import Failed, ModelLoaded, Origin, first_cause
from lp_runtime.launchers.wire.sealed_request import seal
from lp_runtime.launchers.worker.process_host import ProcessHost
from lp_runtime.request.request import Request

logger = logging.getLogger(__name__)

CAUSE_GRACE_SECONDS = 0.5  # wait for further failures: the cause of one may arrive after its consequence
LISTEN_SECONDS = 0.1  # limit of one `receive`, so that replicas started meanwhile are included in the next
RETRY_SECONDS = 10.0  # after a process could not be started: memory or file descriptors may be short for a while
PERIOD_SECONDS = 3600.0  # in which a replica is restarted at most failure.restarts times; then it may be again


class RestartAllowance:
    """Counts restarts: `most` of each replica within PERIOD_SECONDS. Guarded by the pool's condition."""

    def __init__(self, num_replicas: int, most: int, clock: Callable[[], float]):
        self._most, self._clock = most, clock
        self._times: dict[int, list[float]] = {index: [] for index in range(num_replicas)}  # of each one's restarts
        self._given_up: set[int] = set()  # lost when they could not be restarted
        self._retry_at = -math.inf

    def counts(self) -> dict[int, int]:
        """Return how often each replica was restarted within the last PERIOD_SECONDS, by index."""
        since = self._clock() - PERIOD_SECONDS
        return {index: sum(each > since for each in times) for index, times in self._times.items()}

    def use(self, index: int) -> bool:
        """Count a restart of a lost replica and return True; return False if it has no restarts left."""
        if self.counts()[index] >= self._most:
            self._given_up.add(index)
            return False
        self._given_up.discard(index)
        self._times[index].append(self._clock())
        return True

    def give_back(self, index: int) -> None:
        """Undo the latest `use` of a replica whose restart could not begin; it is due after RETRY_SECONDS."""
        self._times[index].pop()
        self._given_up.add(index)
        self._retry_at = self._clock() + RETRY_SECONDS

    def due(self) -> list[int]:
        """Return the indices of given-up replicas that may be restarted now."""
        if self._clock() < self._retry_at:
            return []
        counts = self.counts() if self._given_up else {}
        return sorted(index for index in self._given_up if counts[index] < self._most)


class LoadingReplicas:
    """Indices of the replicas whose models are loading, each with a deadline. Guarded by the pool's condition."""

    def __init__(self, clock: Callable[[], float]):
        self.timeout = math.inf  # seconds from the start of a process
        self._clock = clock
        self._deadlines: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[int]:
        return iter(self._deadlines)

    def add(self, index: int) -> None:
        """Add a replica, without a deadline until `note_start`: its process may have to wait for another's end."""
        self._deadlines[index] = math.inf

    def note_start(self, index: int) -> None:
        if index in self._deadlines:
            self._deadlines[index] = self._clock() + self.timeout

    def discard(self, index: int) -> None:
        self._deadlines.pop(index, None)

    def overdue(self) -> list[int]:
        now = self._clock()
        return [index for index, deadline in self._deadlines.items() if now > deadline]


class ReplicaPool:
    """State of all replicas, and the messages to and from them. Thread-safe.

    A replica has an index, 0 <= index < num_replicas, which it keeps when it is restarted. Its processes differ by
    their incarnation: the number of processes that the replica has lost before.
    """

    def __init__(
        self,
        host: ProcessHost,
        num_replicas: int,
        failure: FailureConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.num_replicas = num_replicas
        self.failure = failure
        self.is_closed = False  # set when `close` begins
        self.changed = threading.Condition(threading.RLock())  # guards the attributes below; notified of every change
        self.inboxes = InboxTable()
        self.losses: dict[int, str] = {}  # reason of each replica's latest loss, by index; the first one lost is first
        self._host = host
        self._allowance = RestartAllowance(num_replicas, failure.restarts, clock)
        self._groups: dict[int, Members] = {}  # the group that each replica is in
        self._loading = LoadingReplicas(clock)
        self._ready: set[int] = set()  # loaded, and not known to be lost
        self._start_failures: dict[int, Failed] | None = {}  # by index; None once `start` has succeeded
        self._incarnations = dict.fromkeys(range(num_replicas), 0)  # lost processes, by index
        self._listener = threading.Thread(target=self._listen, name="lp-pool", daemon=True)
        self._enders: list[threading.Thread] = []  # each waits for the exit of a lost process

    # Starting and losing replicas.

    def start(self, timeout: float) -> None:
        """Start all replicas; return when their models are loaded. If it raises, the caller must call `close`.

        A restarted replica has `timeout` seconds, too; after that it is lost.
        """
        self._loading.timeout = timeout
        for index in range(self.num_replicas):
            self._loading.add(index)
            self._host.start_process(index)
        self._listener.start()
        with self.changed:
            self.changed.wait_for(lambda: self._start_failures or not self._loading, timeout)
            if failures := self._start_failures:  # report the one that explains the others
                known = failures.values()
                self.changed.wait_for(lambda: any(each.origin is Origin.CAUSE for each in known), CAUSE_GRACE_SECONDS)
                index = first_cause(failures)
                failed = failures[index]
                raise (failed.kind or LaunchError)(f"rank {index} failed at start: {failed.message}")
            if self._loading:
                raise LaunchError(
                    f"rank {min(self._loading)} was not ready within launcher.start_timeout={timeout:g} seconds"
                )
            self._start_failures = None

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            for index in range(self.num_replicas):
                self.inboxes.deliver(index, ReplicaLost("the runtime is closed"))
            self.changed.notify_all()
        if self._listener.is_alive():
            self._listener.join()
        with self.changed:
            enders = list(self._enders)
        try:
            for ender in enders:  # a process that one of them starts after `close` would be left running
                ender.join()
        finally:
            self._host.close()

    def lose(self, index: int, reason: str, incarnation: int) -> None:
        """Declare a replica lost: kill its process, put a ReplicaLost into its inboxes, restart it if allowed.

        No effect if that incarnation was lost before. Never waits for the process, whose exit takes seconds if it used
        a GPU; a separate thread restarts the replica after that. `reason` is a few words for messages.
        """
        with self.changed:
            if incarnation != self._incarnations[index]:
                return
            self._incarnations[index] += 1
            self.losses[index] = reason
            self._ready.discard(index)
            self._loading.discard(index)
            self.disband(self.group_of(index))
            self.inboxes.deliver(index, ReplicaLost(reason))
            self.changed.notify_all()
            wait_for_end = self._host.kill(index)
            restarts = self._end_in_thread(index, wait_for_end)
            logger.warning("replica %d was lost (%s)%s", index, reason, "; it is started again" if restarts else "")

    def _end_in_thread(self, index: int, wait_for_end: Callable[[], None]) -> bool:
        """Return whether the replica is restarted. The caller holds `changed`."""
        restarts = not self.is_closed and self._allowance.use(index)
        if restarts:
            self._loading.add(index)
        ender = threading.Thread(target=self._end, args=(index, wait_for_end, restarts), name="lp-end", daemon=True)
        try:
            ender.start()
        except RuntimeError as error:  # the limit of processes and threads is reached
            logger.warning("replica %d cannot be started again for now: %s", index, error)
            self._loading.discard(index)
            if restarts:
                self._allowance.give_back(index)
            return False
        self._enders = [each for each in self._enders if each.is_alive()] + [ender]
        return restarts

    def _restart_given_up(self) -> None:
        with self.changed:
            for index in self._allowance.due():
                if self._end_in_thread(index, lambda: None):
                    logger.warning("replica %d is started again", index)

    def _end(self, index: int, wait_for_end: Callable[[], None], restarts: bool) -> None:
        """Wait for a lost process, and start the replica again; each attempt counts as a restart."""
        while True:
            try:
                wait_for_end()
            except Exception as error:  # the actor is gone, or the cluster does not answer
                logger.info("ending replica %d failed: %s", index, error)
            if not restarts or self.is_closed:
                break
            try:
                with self.changed:
                    self._loading.note_start(index)
                self._host.start_process(index)
                return
            except Exception as error:  # no memory, no file descriptors, no node
                logger.warning("replica %d cannot be started again: %s", index, error)
            with self.changed:
                self._loading.add(index)  # without a deadline
                wait_for_end = self._host.kill(index)  # of its shards, some may have started
                self.changed.wait_for(lambda: self.is_closed, RETRY_SECONDS)
                restarts = self._allowance.use(index)
        with self.changed:
            self._loading.discard(index)
            self.changed.notify_all()

    def _lose_overdue(self) -> None:
        with self.changed:
            for index in self._loading.overdue():
                reason = f"not ready within launcher.start_timeout={self._loading.timeout:g} seconds"
                self.lose(index, reason, self._incarnations[index])

    def wait_until_ready(self, timeout: float, should_cancel: Callable[[], bool]) -> frozenset[int]:
        """Wait up to `timeout` seconds until a replica is ready, none is loading, or the pool is closed.

        `should_cancel` is called several times a second, and ends the wait when it returns true. Returns the replicas
        that are ready.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            while not self._ready and self._loading and not self.is_closed and time.monotonic() < deadline:
                if should_cancel():
                    break
                self.changed.wait(LISTEN_SECONDS)
            return self.ready

    @property
    def ready(self) -> frozenset[int]:
        """Indices of the replicas that take orders; none once the pool is closed."""
        with self.changed:
            return frozenset(() if self.is_closed else self._ready)

    @property
    def num_loading(self) -> int:
        with self.changed:
            return 0 if self.is_closed else len(self._loading)

    @property
    def num_restarts(self) -> dict[int, int]:
        with self.changed:
            return self._allowance.counts()

    def incarnation(self, index: int) -> int:
        with self.changed:
            return self._incarnations[index]

    def why_lost(self) -> str:
        return "; ".join(f"replica {index}: {reason}" for index, reason in sorted(self.losses.items()))

    def _listen(self) -> None:
        while not self.is_closed:
            try:
                self._restart_given_up()
                self._lose_overdue()
                with self.changed:
                    incarnations = dict(self._incarnations)
                for index, message in self._host.receive(LISTEN_SECONDS):
                    self._route(index, message, incarnations[index])
            except Exception:  # keep the thread alive: without it no answer would arrive
                if not self.is_closed:
                    logger.exception("receiving messages from replicas failed; trying again")
                    time.sleep(LISTEN_SECONDS)

    def _route(self, index: int, message: object, incarnation: int) -> None:
        with self.changed:
            if incarnation != self._incarnations[index]:  # it was lost by an earlier message
                return
            if isinstance(message, ModelLoaded):
                self._ready.add(index)
                self._loading.discard(index)
            elif isinstance(message, Failed):
                if self._start_failures is not None:
                    known = self._start_failures.setdefault(index, message)  # the first one's reason is not the exit
                    if message.origin is Origin.CAUSE and known.origin is not Origin.CAUSE:  # of another shard
                        self._start_failures[index] = message
                else:
                    self.lose(index, message.message, incarnation)
            else:
                self.inboxes.deliver(index, message)
            self.changed.notify_all()

    # Orders and their answers.

    def send(self, index: int, message: object) -> None:
        """Send a message to a replica; never waits."""
        self._host.send(index, message)

    def sealed(self, request: Request) -> bytes:
        return seal(request, self._host.pickled)

    @contextlib.contextmanager
    def open_inbox(self, members: Members) -> Iterator[Inbox]:
        """Assign a number to a new order to `members`, and yield its inbox, which is open during the block."""
        with self.changed:
            inbox = self.inboxes.add(members, self._incarnations)
            for index in set(members) - self.ready:  # lost before the inbox existed
                inbox.messages.put((index, ReplicaLost(self.losses.get(index, "it is not running"))))
        try:
            yield inbox
        finally:
            with self.changed:
                self.inboxes.remove(inbox)

    def send_order(self, inbox: Inbox, index: int, order: object) -> None:
        """Send a member its order, unless it was lost since the inbox was opened."""
        with self.changed:  # a restarted process must not get the order of the one before
            is_there = index in self.ready and self._incarnations[index] == inbox.incarnations[index]
        if is_there:
            self._host.send(index, order)

    # Groups.

    def group_of(self, index: int) -> Members:
        with self.changed:
            return self._groups.get(index, ())

    def note_group(self, members: Members) -> None:
        with self.changed:
            self._groups |= dict.fromkeys(members, members)

    def disband(self, members: Iterable[int]) -> None:
        with self.changed:
            for index in members:
                self._groups.pop(index, None)
