"""Where the answers of replicas to a driver's orders arrive."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass

from lp_runtime.launchers.wire.messages import PONG

Members = tuple[int, ...]  # replica indices of a group, rank 0 first


@dataclass(frozen=True)
class ReplicaLost:
    """Put into an inbox by the pool: a replica is lost, and answers nothing more.

    Attributes:
        reason: why, in a few words.
    """

    reason: str


@dataclass(frozen=True)
class Inbox:
    """What replicas answer to one order.

    Attributes:
        order: number of the order.
        members: replicas that were given the order.
        messages: (replica index, message) of all answers not read yet.
        incarnations: by replica index, which of a replica's processes was meant; see ReplicaPool.
    """

    order: int
    members: Members
    messages: queue.SimpleQueue[tuple[int, object]]
    incarnations: dict[int, int]


class InboxTable:
    """The inboxes of all orders that somebody waits for. Guarded by the pool's condition.

    Attributes:
        open: inboxes by the number of their order.
    """

    def __init__(self) -> None:
        self.open: dict[int, Inbox] = {}
        self._last_order = 0

    def add(self, members: Members, incarnations: Mapping[int, int]) -> Inbox:
        """Number a new order to `members`, and return the inbox for its answers."""
        self._last_order += 1
        inbox = Inbox(self._last_order, members, queue.SimpleQueue(), dict(incarnations))
        self.open[inbox.order] = inbox
        return inbox

    def remove(self, inbox: Inbox) -> None:
        """Drop an inbox; answers that come later are dropped, too."""
        del self.open[inbox.order]

    def deliver(self, index: int, message: object) -> None:
        """Put a replica's answer into the inbox of its order; a PONG goes to every inbox that the replica is in."""
        order = getattr(message, "order", None)
        for inbox in self.open.values():
            if index in inbox.members and (message == PONG or order == inbox.order):
                inbox.messages.put((index, message))

    def announce_loss(self, index: int, reason: str) -> None:
        """Put a ReplicaLost into every inbox that a replica is in."""
        for inbox in self.open.values():
            if index in inbox.members:
                inbox.messages.put((index, ReplicaLost(reason)))
