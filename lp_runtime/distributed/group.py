"""The group of replicas that share a request's steps. Imports nothing that communicates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """The replicas that share a request's steps, as one of them sees it.

    Attributes:
        rank: This replica's place, 0 <= rank < size.
        size: Number of replicas R, >= 1.
        device: Device on which the transport wants its tensors.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device = CPU) -> Group:
        """Return the group of one replica, which exchanges nothing.

        Args:
            device: Device on which tensors to exchange are kept.
        """
        return cls(0, 1, device)

    @property
    def is_alone(self) -> bool:
        """Whether the group is a single replica, which exchanges nothing."""
        return self.size == 1
