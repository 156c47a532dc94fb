"""Forms groups of replicas that decode a request together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.errors import ReplicaError
from lp_runtime.launchers.driver.answers import read_answers
from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.wire.inbox import Members, ReplicaLost
from lp_runtime.launchers.wire.messages import Join, Joined, Refused
from lp_runtime.launchers.worker.process_host import ProcessHost, Rendezvous
from lp_runtime.replica.replica import ReplicaInfo


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

        Replicas that are lost meanwhile are left out.

        Raises:
            LookaheadError: if the replicas refuse to form a group, or cannot reach each other.
        """
        wanted = set(members)
        with contextlib.ExitStack() as held:
            for index in sorted(wanted):  # ascending, against deadlocks; requests that share a replica take turns
                held.enter_context(self._forming[index])
            return self._form(wanted)

    def _form(self, wanted: set[int]) -> Members | None:
        pool = self._pool
        for _ in range(2 * pool.num_replicas + 1):
            with pool.changed:
                wanted &= pool.ready
                group = tuple(sorted(wanted))
                if not group or all(pool.group_of(index) == group for index in group):
                    return group or None
                for index in group:
                    pool.disband(pool.group_of(index))
                incarnation = pool.incarnation(group[0])
            meeting = Rendezvous() if len(group) == 1 else self._host.rendezvous(group)
            if meeting is None:
                pool.lose(group[0], "it cannot be reached", incarnation)
                continue
            infos = self._join(group, meeting)
            if len(infos) == len(group):
                with pool.changed:
                    self._info = infos[group[0]]
                    pool.note_group(group)
        raise ReplicaError(f"no group could be formed ({pool.why_lost() or 'the replicas cannot reach each other'})")

    def _join(self, group: Members, meeting: Rendezvous) -> dict[int, ReplicaInfo]:
        """Order replicas to join their group, and return the info of those that have joined, by index."""
        pool = self._pool
        infos = {}
        with pool.open_inbox(group) as inbox:
            for rank, index in enumerate(group):
                place = self._host.placement(index)
                context = ReplicaContext(
                    rank,
                    len(group),
                    place.device_index,
                    place.num_local,
                    meeting.host,
                    meeting.port,
                    segment=meeting.segment,
                    attempt=inbox.order,
                )
                pool.send_order(inbox, index, Join(inbox.order, context))
            for index, message in read_answers(pool, inbox, set(group)):
                if isinstance(message, Refused):
                    raise message.kind(message.message)
                if isinstance(message, Joined):
                    infos[index] = message.info
                elif isinstance(message, ReplicaLost):
                    break  # the next Join makes the others give up this group
        return infos
