"""Inboxes: queues of the replicas' answers, one for each of the driver's orders."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass

from lp_runtime.launchers.wire.messages import PONG

Members = tuple[int, ...]  # replica indices of a group, rank 0 first


@dataclass(frozen=True)
class ReplicaLost:
    """Message that the pool puts into an inbox: the replica is lost and will not answer."""

    reason: str  # a few words for messages


@dataclass(frozen=True)
class Inbox:
    """Queue of the answers to one order."""

    order: int
    members: Members  # replicas that received the order
    messages: queue.SimpleQueue[tuple[int, object]]  # (replica index, message) of the answers that were not read yet
    incarnations: dict[int, int]  # by replica index, the process that received the order; see ReplicaPool


class InboxTable:
    """Inboxes of all orders whose answers are awaited. Guarded by the pool's condition."""

    def __init__(self) -> None:
        self.open: dict[int, Inbox] = {}  # by order number
        self._last_order = 0

    def add(self, members: Members, incarnations: Mapping[int, int]) -> Inbox:
        self._last_order += 1
        inbox = Inbox(self._last_order, members, queue.SimpleQueue(), dict(incarnations))
        self.open[inbox.order] = inbox
        return inbox

    def remove(self, inbox: Inbox) -> None:
        """Remove an inbox; later answers to its order are dropped."""
        del self.open[inbox.order]

    def deliver(self, index: int, message: object) -> None:
        """Put a replica's answer into the inbox of its order; PONG and ReplicaLost go to all of its inboxes."""
        is_for_all = message == PONG or isinstance(message, ReplicaLost)
        for inbox in self.open.values():
            if index in inbox.members and (is_for_all or getattr(message, "order", None) == inbox.order):
                inbox.messages.put((index, message))
