"""Group of replicas that share a request's steps, and its transport. Never imports torch.distributed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

CPU = torch.device("cpu")


class Transport(ABC):
    """Carries integers between the replicas of one group.

    Implemented by shared_memory.py, collectives.py and machines.py. All replicas of the group must make the same calls
    in the same order, except for `abort` and `close`. They raise ReplicaError if a peer is gone, does not answer in
    time, or the group was aborted.
    """

    def __init__(self, name: str, device: torch.device):
        self.name = name  # a value of launcher.backend, or "shared and network"
        self.device = device  # on which `all_gather` expects its tensors

    @abstractmethod
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Gather the integers of every replica. On a GPU the gather is only queued; `wait` waits for it.

        Args:
            received: [R * n] int64, written, in the order of ranks.
            sent: [n] int64, with the same n on every replica.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        """Return rank 0's bytes on every replica; `data` is None on the others.

        A patient wait for rank 0's call has no limit; only the end of its process is an error.
        """

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for all work, gathers included, that was queued on this replica's GPU before an event."""
        event.synchronize()

    @abstractmethod
    def abort(self) -> None:
        """Make this replica's current and later calls raise ReplicaError. Thread-safe; does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group without waiting for peers, whose later calls raise ReplicaError."""


@dataclass(frozen=True)
class Group:
    """Replicas that share a request's steps, from the view of one of them."""

    rank: int  # of this replica, 0 <= rank < size
    size: int  # number of replicas R, >= 1
    transport: Transport | None = field(default=None, compare=False)  # None if nothing is exchanged over one

    @classmethod
    def alone(cls) -> Group:
        """Return the group of a single replica."""
        return cls(0, 1)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors that are exchanged."""
        return CPU if self.transport is None else self.transport.device

    @property
    def connected(self) -> Transport:
        assert self.transport is not None, "a group that exchanges has a transport"
        return self.transport
