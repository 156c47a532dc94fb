"""What carries integers between the replicas of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Transport(ABC):
    """Carries integers between the replicas of one group; implemented by shared_memory.py and collectives.py.

    All replicas of the group make the same calls in the same order, except for `abort` and `close`.

    Args:
        name: of the transport, as launcher.backend names it.
        device: on which tensors to be gathered lie.

    Attributes:
        name: see Args.
        device: see Args.
    """

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self.device = device

    @abstractmethod
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Gather the integers of every replica. On a GPU the gather is queued, and `wait` waits for it.

        Args:
            received: [R * n] int64, written to, in the order of ranks.
            sent: [n] int64, of the same n on every replica.

        Raises:
            ReplicaError: if a peer is gone, does not answer in time, or the group was aborted.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        """Return rank 0's bytes on every replica.

        Args:
            data: the bytes on rank 0; None on others.
            is_patient: whether rank 0 may take any time before it calls: only its end is an error then.

        Raises:
            ReplicaError: if a peer is gone, does not answer in time, or the group was aborted.
        """

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for what was queued on this replica's GPU before an event.

        Raises:
            ReplicaError: if a queued gather cannot end, because a peer is gone or the group was aborted.
        """
        event.synchronize()

    @abstractmethod
    def abort(self) -> None:
        """Make this replica's present and later calls raise ReplicaError. Called by any thread; waits for nobody."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Waits for no peer; their later calls raise ReplicaError."""
