"""Reading what replicas answer to an order, however long they take, and noticing those that keep silent."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.wire.inbox import Inbox, ReplicaLost
from lp_runtime.launchers.wire.messages import PING, PONG, Abort, GroupBroken, Refused, Streamed

PINGS_PER_HEARTBEAT = 5
QUIET_SECONDS = 0.1  # without an answer, after which whoever reads is told so
NOBODY = -1  # index of Quiet


@dataclass(frozen=True)
class Quiet:
    """Nothing was answered for QUIET_SECONDS."""


class AnswerReader:
    """Reads the answers to one order.

    Members that are waited for are pinged all the time; a thread of their own answers, whatever they compute. One that
    does not answer within failure.heartbeat is lost. Once something went wrong, the others are told to leave their
    group. They have failure.timeout to come to their end; one that does not is lost, too.

    Args:
        pool: of the replicas.
        inbox: where the answers arrive.
        waiting: members that have not had their last word; they are removed from it as they have.
    """

    def __init__(self, pool: ReplicaPool, inbox: Inbox, waiting: set[int]):
        self._pool = pool
        self._inbox = inbox
        self._waiting = waiting
        self._timeout, self._heartbeat = pool.failure.timeout, pool.failure.heartbeat
        # Pings are counted, not seconds: where this process itself was stopped, nobody else is to blame.
        self._num_unanswered = dict.fromkeys(waiting, 0)
        self._next_ping = time.monotonic() + self._heartbeat / PINGS_PER_HEARTBEAT
        self._end: float | None = None  # when those must have ended that are left, once something went wrong

    def read(self) -> Iterator[tuple[int, object]]:
        """Yield (index, message) of each answer, until every member had its last word or is lost; (NOBODY, Quiet)
        where none comes for a while."""
        while self._waiting:
            try:
                left = max(0.0, self._next_ping - time.monotonic())
                index, message = self._inbox.messages.get(timeout=min(left, QUIET_SECONDS))
            except queue.Empty:
                if time.monotonic() >= self._next_ping:
                    self._check_silent()
                yield NOBODY, Quiet()
                continue
            self._num_unanswered[index] = 0
            if message == PONG or index not in self._waiting:
                continue
            self._note(index, message)
            yield index, message

    def _check_silent(self) -> None:
        """Lose members that did not answer their pings or did not end in time, and ping the others."""
        now = time.monotonic()
        for index in sorted(self._waiting):
            if self._num_unanswered[index] >= PINGS_PER_HEARTBEAT:
                self._lose(index, f"it did not answer within {self._heartbeat:g} s")
            elif self._end is not None and now > self._end:
                self._lose(index, f"it did not end within {self._timeout:g} s")
            else:
                self._num_unanswered[index] += 1
                self._pool.send(index, PING)
        self._next_ping = now + self._heartbeat / PINGS_PER_HEARTBEAT

    def _lose(self, index: int, reason: str) -> None:
        self._pool.lose(index, reason, self._inbox.incarnations[index])

    def _note(self, index: int, message: object) -> None:
        """Note that a member that is waited for has answered, and what that means for the others."""
        if not isinstance(message, Streamed):
            self._waiting.discard(index)
        if isinstance(message, ReplicaLost | GroupBroken | Refused) and self._end is None:
            self._end = time.monotonic() + self._timeout
            for other in self._waiting:
                self._pool.send(other, Abort(self._inbox.order))


def read_answers(pool: ReplicaPool, inbox: Inbox, waiting: set[int]) -> Iterator[tuple[int, object]]:
    """Yield (index, message) of each answer to an order, until every member had its last word or is lost, and
    (NOBODY, Quiet) where none comes for a while: see AnswerReader."""
    return AnswerReader(pool, inbox, waiting).read()
