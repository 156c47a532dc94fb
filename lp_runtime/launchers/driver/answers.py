"""Reads the replicas' answers to an order, and detects replicas that no longer respond."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.wire.inbox import Inbox, ReplicaLost
from lp_runtime.launchers.wire.messages import PING, PONG, Abort, GroupBroken, Refused, Streamed

PINGS_PER_HEARTBEAT = 5
CANCEL_TIMEOUTS = 10  # of failure.timeout: on a slow CPU a chunk of a long prompt takes longer than a step may
QUIET_SECONDS = 0.1  # without an answer until the caller gets (-1, None), so that it can act meanwhile


class AnswerReader:
    """Reads the answers to one order.

    Members that have not finished are pinged regularly; a separate thread in the replica answers, even during a forward
    pass. A member that does not answer within failure.heartbeat is lost. If a member fails, the others are ordered to
    leave their group (Abort); one that does not finish within failure.timeout is lost, too. A member that does not
    finish within CANCEL_TIMEOUTS of these after the order was cancelled is also lost. `waiting` are the members
    that have not sent their final answer; the reader removes each one that has.
    """

    def __init__(self, pool: ReplicaPool, inbox: Inbox, waiting: set[int]):
        self._pool = pool
        self._inbox = inbox
        self._waiting = waiting
        self._timeout, self._heartbeat = pool.failure.timeout, pool.failure.heartbeat
        # Counts pings instead of seconds: if this process was suspended, the replicas must not be lost for it.
        self._num_unanswered = dict.fromkeys(waiting, 0)
        self._next_ping = time.monotonic() + self._heartbeat / PINGS_PER_HEARTBEAT
        self._end: float | None = None  # time.monotonic() by which all members must finish; None for no limit
        self._limit = 0.0  # seconds that `_end` was set to
        self._is_aborted = False

    def note_cancel(self) -> None:
        """Note that the order was cancelled. Called by any thread."""
        self._expect_end(CANCEL_TIMEOUTS * self._timeout)

    def _expect_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        if self._end is None or end < self._end:
            self._end, self._limit = end, seconds

    def read(self) -> Iterator[tuple[int, object]]:
        """Yield (index, message) of answers until every member has finished or is lost; (-1, None) if quiet."""
        while self._waiting:
            try:
                left = max(0.0, self._next_ping - time.monotonic())
                index, message = self._inbox.messages.get(timeout=min(left, QUIET_SECONDS))
            except queue.Empty:
                if time.monotonic() >= self._next_ping:
                    self._check_silent()
                yield -1, None
                continue
            self._num_unanswered[index] = 0
            if message == PONG or index not in self._waiting:
                continue
            self._note(index, message)
            yield index, message

    def _check_silent(self) -> None:
        """Declare members lost that did not answer their pings or did not finish in time; ping the others."""
        now = time.monotonic()
        for index in sorted(self._waiting):
            if self._num_unanswered[index] >= PINGS_PER_HEARTBEAT:
                self._lose(index, f"it did not answer within {self._heartbeat:g} s")
            elif self._end is not None and now > self._end:
                self._lose(index, f"it did not end within {self._limit:g} s")
            else:
                self._num_unanswered[index] += 1
                self._pool.send(index, PING)
        self._next_ping = now + self._heartbeat / PINGS_PER_HEARTBEAT

    def _lose(self, index: int, reason: str) -> None:
        self._pool.lose(index, reason, self._inbox.incarnations[index])

    def _note(self, index: int, message: object) -> None:
        """Record a member's answer; if it reports a failure, abort the order on the other members."""
        if not isinstance(message, Streamed):
            self._waiting.discard(index)
        if isinstance(message, ReplicaLost | GroupBroken | Refused) and not self._is_aborted:
            self._is_aborted = True
            self._expect_end(self._timeout)
            for other in self._waiting:
                self._pool.send(other, Abort(self._inbox.order))
