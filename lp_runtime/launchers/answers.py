"""Reading what replicas answer to an order, however long they take, and noticing those that keep silent."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

from lp_runtime.launchers.inbox import Inbox, ReplicaLost
from lp_runtime.launchers.messages import PING, PONG, GroupBroken, Refused, Streamed
from lp_runtime.launchers.replica_pool import ReplicaPool

PING_TIMEOUT_SECONDS = 5.0  # that a replica may take to answer a ping: a thread of its own answers


class AnswerReader:
    """Reads the answers to one order.

    A replica that keeps silent is pinged: after failure.timeout, or as soon as something went wrong. From then on the
    others have failure.timeout to come to their end. A replica that misses either time is lost.

    Args:
        pool: of the replicas.
        inbox: where the answers arrive.
        waiting: members that have not had their last word; they are removed from it as they have.
    """

    def __init__(self, pool: ReplicaPool, inbox: Inbox, waiting: set[int]):
        self._pool = pool
        self._inbox = inbox
        self._waiting = waiting
        self._timeout = pool.failure.timeout
        self._pinged: set[int] = set()
        self._deadline = 0.0  # when the silent ones are pinged, or are lost if they were
        self._end: float | None = None  # when those must have ended that are left, once something went wrong

    def read(self) -> Iterator[tuple[int, object]]:
        """Yield (index, message) of each answer, until every member had its last word or is lost."""
        self._deadline = time.monotonic() + self._timeout
        while self._waiting:
            try:
                index, message = self._inbox.messages.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                self._check_silent()
                continue
            self._pinged.discard(index)
            if message == PONG or index not in self._waiting:
                continue
            self._note(index, message)
            yield index, message

    def _check_silent(self) -> None:
        """Lose members that did not answer a ping or did not end in time, and ping the others that are waited for."""
        now = time.monotonic()
        silent = self._waiting & self._pinged if self._end is None or now < self._end else set(self._waiting)
        for index in sorted(silent):
            in_vain = index in self._pinged
            reason = "it did not answer" if in_vain else f"it did not end within {self._timeout:g} s"
            self._pool.lose(index, reason, self._inbox.incarnations[index])
        self._pinged = self._waiting - silent
        for index in self._pinged:
            self._pool.send(index, PING)
        self._deadline = now + (0.0 if silent else PING_TIMEOUT_SECONDS)

    def _note(self, index: int, message: object) -> None:
        """Note that a member that is waited for has answered, and what that means for the time that is left."""
        if not isinstance(message, Streamed):
            self._waiting.discard(index)
        if isinstance(message, ReplicaLost | GroupBroken | Refused):
            if self._end is None:
                self._end = time.monotonic() + self._timeout
                self._deadline = time.monotonic()
        elif self._end is None:
            self._deadline = time.monotonic() + self._timeout
            self._pinged.clear()


def read_answers(pool: ReplicaPool, inbox: Inbox, waiting: set[int]) -> Iterator[tuple[int, object]]:
    """Yield (index, message) of each answer to an order, until every member had its last word or is lost: see
    AnswerReader."""
    return AnswerReader(pool, inbox, waiting).read()
