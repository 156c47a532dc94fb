"""Forms groups of replicas that decode a request together."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import LaunchError, ReplicaError
from lp_runtime.launchers.driver.answers import AnswerReader
from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.wire.inbox import Members, ReplicaLost
from lp_runtime.launchers.wire.messages import GroupBroken, Join, Joined, Refused
from lp_runtime.launchers.worker.process_host import ProcessHost
from lp_runtime.replica.loaded_model import ReplicaInfo

Answer = Joined | GroupBroken | ReplicaLost  # to a Join

log = logging.getLogger(__name__)


class GroupFormer:
    """Forms groups of a pool's replicas. Thread-safe."""

    def __init__(self, pool: ReplicaPool, host: ProcessHost):
        self._pool = pool
        self._host = host
        self._forming = [threading.Lock() for _ in range(pool.num_replicas)]  # held while the replica's group is formed
        self._info: ReplicaInfo | None = None

    @property
    def info(self) -> ReplicaInfo:
        """Model info from rank 0 of the group that was formed last."""
        assert self._info is not None, "no group has been formed"
        return self._info

    def form(self, members: Iterable[int]) -> Members | None:
        """Form a group of replicas unless they already are one, and return it; None if all of them are lost.

        Replicas that are lost meanwhile are left out. Those that cannot reach the others count as lost. If this machine
        has no means of exchange at present, the group is one of the replicas, and no other one is lost.
        """
        wanted = set(members)
        with contextlib.ExitStack() as held:
            for index in sorted(wanted):  # ascending, against deadlocks; requests that share a replica take turns
                held.enter_context(self._forming[index])
            return self._form(wanted)

    def _form(self, wanted: set[int]) -> Members | None:
        pool = self._pool
        num_separated = 0  # groups that did not form although no member was lost
        for _ in range(2 * pool.num_replicas + 1):
            with pool.changed:
                wanted &= pool.ready
                group = tuple(sorted(wanted))
                if not group or all(pool.group_of(index) == group for index in group):
                    return group or None
                for index in group:
                    pool.disband(pool.group_of(index))
                incarnations = {index: pool.incarnation(index) for index in group}
            try:
                meeting = ReplicaContext() if len(group) == 1 else self._host.rendezvous(group)
            except LaunchError as error:
                if self._info is None:  # the runtime starts
                    raise
                _warn_alone(str(error))
                wanted = {group[0]}
                continue
            answers = self._join(group, meeting, incarnations[group[0]])
            if self._note_joined(group, answers) or ReplicaLost in map(type, answers.values()):
                continue
            num_separated += 1
            reasons = [answer.reason for answer in answers.values() if isinstance(answer, GroupBroken)]
            for index in self._separated(group, answers, num_separated):
                pool.lose(index, f"it cannot reach the others: {reasons[0]}", incarnations[index])
        raise ReplicaError(f"no group could be formed ({pool.why_lost() or 'the replicas cannot reach each other'})")

    def _note_joined(self, group: Members, answers: Mapping[int, Answer]) -> bool:
        infos = {index: answer.info for index, answer in answers.items() if isinstance(answer, Joined)}
        if len(infos) < len(group):
            return False
        with self._pool.changed:
            self._info = infos[group[0]]
            self._pool.note_group(group)
        return True

    @staticmethod
    def _separated(group: Members, answers: Mapping[int, Answer], num_separated: int) -> set[int]:
        """Return the members of a group that did not form to go on without; none at first if unclear which.

        A network that is cut between replicas may leave all of them in reach of the driver.
        """
        present = {index for index, answer in answers.items() if isinstance(answer, GroupBroken) and answer.was_present}
        if present and len(present) < len(group):
            return set(group) - present
        return set(group[1:]) if num_separated > 1 else set()

    def _join(self, group: Members, meeting: ReplicaContext | None, incarnation: int) -> dict[int, Answer]:
        """Order replicas to join their group, whose rank 0 has this incarnation; return the answers by index."""
        pool = self._pool
        if meeting is None:
            pool.lose(group[0], reason := "it cannot be reached", incarnation)
            return {group[0]: ReplicaLost(reason)}
        # The members of a later group run already. One that is in the way of a request must not be waited for longer.
        is_start = self._info is None
        timeout = None if is_start else pool.failure.timeout
        answers: dict[int, Answer] = {}
        with pool.open_inbox(group) as inbox:
            for rank, index in enumerate(group):
                context = replace(meeting, rank=rank, num_replicas=len(group), attempt=inbox.order)
                pool.send_order(inbox, index, Join(inbox.order, context, timeout, is_start))
            for index, message in AnswerReader(pool, inbox, set(group)).read():
                if isinstance(message, Refused):
                    raise message.kind(message.message)
                if isinstance(message, Joined | GroupBroken | ReplicaLost):
                    answers[index] = message
                if isinstance(message, ReplicaLost):
                    break  # the next Join makes the others give up this group
        return answers


@functools.cache  # once per process and reason
def _warn_alone(reason: str) -> None:
    log.warning("replicas cannot exchange, so each request is decoded by one of them: %s", reason)
