"""An order that was given to some replicas, and where their answers arrive."""

from __future__ import annotations

import queue
from dataclasses import dataclass

Group = tuple[int, ...]  # members, rank 0 first


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
