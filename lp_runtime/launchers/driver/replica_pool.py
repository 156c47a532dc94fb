"""Replicas in processes of their own: started, listened to, lost and started again.

One thread listens to all replicas, and puts what they answer into the inbox of the order that it answers. Whoever has
given the order reads the inbox in a thread of its own (answers.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from lp_runtime.config.settings import FailureConfig
from lp_runtime.errors import LaunchError
from lp_runtime.launchers.wire.inbox import Inbox, InboxTable, Members, ReplicaLost
from lp_runtime.launchers.wire.messages import Failed, ModelLoaded, SealedRequest, first_cause
from lp_runtime.launchers.worker.process_host import ProcessHost
from lp_runtime.request.request import Request

logger = logging.getLogger(__name__)

CAUSE_GRACE_SECONDS = 0.5  # in which a failure's cause may arrive after its consequence
LISTEN_SECONDS = 0.1  # after which a replica that was started meanwhile is listened to


class ReplicaPool:
    """Which replicas are there, and how to talk to them.

    Replicas are known by an index, 0 <= index < num_replicas; a replica that is started again keeps it. Its processes
    are told apart by their incarnation: how many processes the replica had lost before.

    Args:
        host: starts and reaches the processes.
        num_replicas: how many replicas there are.
        failure: when a silent replica is lost, and how often a lost one is started again.

    Attributes:
        num_replicas: how many replicas there are.
        failure: when a silent replica is lost, and how often a lost one is started again.
        changed: guards the pool's state; notified of every change. Its lock can be taken again by its holder.
        inboxes: for the answers to all orders that somebody waits for.
        losses: why each replica was lost last, by its index; the first that was lost comes first.
        num_restarts: how often each replica was started again, by its index.
        is_closed: whether the pool is closed or being closed.
    """

    def __init__(self, host: ProcessHost, num_replicas: int, failure: FailureConfig):
        self.num_replicas = num_replicas
        self.failure = failure
        self.is_closed = False
        self.changed = threading.Condition(threading.RLock())  # guards what follows
        self.inboxes = InboxTable()
        self.losses: dict[int, str] = {}
        self.num_restarts = dict.fromkeys(range(num_replicas), 0)
        self._host = host
        self._groups: dict[int, Members] = {}  # the group that each replica is in
        self._loading: set[int] = set()
        self._ready: set[int] = set()  # loaded, and not known to be lost
        self._start_failures: dict[int, Failed] | None = {}  # None once all have started
        self._incarnations = dict.fromkeys(range(num_replicas), 0)  # processes that each has lost
        self._listener = threading.Thread(target=self._listen, name="lp-pool", daemon=True)
        self._enders: list[threading.Thread] = []  # each waits for the end of a lost process

    # Replicas come and go.

    def start(self, timeout: float) -> None:
        """Start all replicas, and return when their models are loaded.

        Args:
            timeout: seconds that they may take.

        Raises:
            LookaheadError: if any of them fails; `close` ends the others.
        """
        for index in range(self.num_replicas):
            self._loading.add(index)
            self._host.start_process(index)
        self._listener.start()
        with self.changed:
            self.changed.wait_for(lambda: self._start_failures or not self._loading, timeout)
            if failures := self._start_failures:  # of all that fail within the grace, the one that explains the rest
                self.changed.wait_for(lambda: len(failures) == self.num_replicas, CAUSE_GRACE_SECONDS)
                index = first_cause(failures)
                failed = failures[index]
                raise (failed.kind or LaunchError)(f"rank {index} failed at start: {failed.message}")
            if self._loading:
                raise LaunchError(
                    f"rank {min(self._loading)} was not ready within launcher.start_timeout={timeout:g} seconds"
                )
            self._start_failures = None

    def close(self) -> None:
        """Stop listening and end all processes."""
        self.is_closed = True
        if self._listener.is_alive():
            self._listener.join()
        with self.changed:
            enders = list(self._enders)
        for ender in enders:  # what they start would outlive the host
            ender.join()
        self._host.close()

    def lose(self, index: int, reason: str, incarnation: int) -> None:
        """Note that a replica is lost: end its process, start it again if it may be, and say so in its inboxes. Has no
        effect for a process that was lost before.

        Never waits for the process: its end takes seconds where it had a GPU, and the others go on meanwhile. It is
        started again when the lost process has ended.

        Args:
            index: the replica.
            reason: why it is lost, in a few words.
            incarnation: which of its processes is lost.
        """
        with self.changed:
            if incarnation != self._incarnations[index]:
                return
            self._incarnations[index] += 1
            self.losses[index] = reason
            self._ready.discard(index)
            self._loading.discard(index)
            self.disband(self.group_of(index))
            wait_for_end = self._host.kill(index)
            again = self.num_restarts[index] < self.failure.restarts and not self.is_closed
            logger.warning("replica %d was lost (%s)%s", index, reason, "; it is started again" if again else "")
            if again:
                self.num_restarts[index] += 1
                self._loading.add(index)
            ender = threading.Thread(target=self._end, args=(index, wait_for_end, again), name="lp-end", daemon=True)
            ender.start()
            self._enders = [each for each in self._enders if each.is_alive()] + [ender]
            self.inboxes.announce_loss(index, reason)
            self.changed.notify_all()

    def _end(self, index: int, wait_for_end: Callable[[], None], again: bool) -> None:
        """Wait for the end of a lost process, then start its replica again if `again` says so."""
        try:
            wait_for_end()
            if again and not self.is_closed:
                self._host.start_process(index)
        except Exception as error:  # no memory, no file descriptors, no node
            logger.warning("replica %d cannot be started again: %s", index, error)
            with self.changed:
                self._loading.discard(index)
                self.changed.notify_all()

    def wait_until_ready(self, timeout: float) -> frozenset[int]:
        """Wait until a replica is ready, or none is loading, and return those that are ready.

        Args:
            timeout: seconds to wait at most.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._ready or not self._loading, timeout)
            return frozenset(self._ready)

    @property
    def ready(self) -> frozenset[int]:
        """Replicas that are loaded and not known to be lost."""
        with self.changed:
            return frozenset(self._ready)

    @property
    def num_loading(self) -> int:
        """Number of replicas that are being started or started again."""
        with self.changed:
            return len(self._loading)

    def incarnation(self, index: int) -> int:
        """Return the incarnation of a replica's present process."""
        with self.changed:
            return self._incarnations[index]

    def why_lost(self) -> str:
        """Return why each replica was lost last, in one line; empty if none was."""
        return "; ".join(f"replica {index}: {reason}" for index, reason in sorted(self.losses.items()))

    def _listen(self) -> None:
        while not self.is_closed:
            incarnations = dict(self._incarnations)
            try:
                for index, message in self._host.receive(LISTEN_SECONDS):
                    self._route(index, message, incarnations[index])
            except Exception:  # without this thread nothing goes on
                if not self.is_closed:
                    logger.exception("listening to replicas failed; going on")
                    time.sleep(LISTEN_SECONDS)

    def _route(self, index: int, message: object, incarnation: int) -> None:
        """Take what a replica says to whom it concerns."""
        with self.changed:
            if isinstance(message, ModelLoaded):
                self._ready.add(index)
                self._loading.discard(index)
            elif isinstance(message, Failed):
                if self._start_failures is not None:
                    self._start_failures.setdefault(index, message)  # its end comes after its reason
                else:
                    self.lose(index, message.message, incarnation)
            else:
                self.inboxes.deliver(index, message)
            self.changed.notify_all()

    # Orders and what is answered.

    def send(self, index: int, message: object) -> None:
        """Send a message to a replica, whatever it is doing."""
        self._host.send(index, message)

    def sealed(self, request: Request) -> SealedRequest:
        """Return a request as it is sent to replicas."""
        return SealedRequest.of(request, self._host.pickled)

    @contextlib.contextmanager
    def open_inbox(self, members: Members) -> Iterator[Inbox]:
        """Number a new order to `members`, and hold the inbox for their answers open."""
        with self.changed:
            inbox = self.inboxes.add(members, self._incarnations)
            for index in set(members) - self._ready:  # lost before they could be waited for
                inbox.messages.put((index, ReplicaLost(self.losses.get(index, "it is not there"))))
        try:
            yield inbox
        finally:
            with self.changed:
                self.inboxes.remove(inbox)

    def send_order(self, inbox: Inbox, index: int, order: object) -> None:
        """Send a member its order, unless it has been lost since the inbox was opened: the process that came after it
        must not get the order."""
        with self.changed:
            is_there = index in self._ready and self._incarnations[index] == inbox.incarnations[index]
        if is_there:
            self._host.send(index, order)

    # Groups.

    def group_of(self, index: int) -> Members:
        """Return the group that a replica is in; empty if it is in none."""
        with self.changed:
            return self._groups.get(index, ())

    def note_group(self, members: Members) -> None:
        """Note that replicas have formed a group."""
        with self.changed:
            self._groups |= dict.fromkeys(members, members)

    def disband(self, members: Iterable[int]) -> None:
        """Note that replicas are in no group any more."""
        with self.changed:
            for index in members:
                self._groups.pop(index, None)
