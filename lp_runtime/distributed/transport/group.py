"""The group of replicas that share a request's steps. Imports nothing that communicates."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lp_runtime.distributed.transport.transport import Transport

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """The replicas that share a request's steps, as one of them sees it.

    Attributes:
        rank: This replica's place, 0 <= rank < size.
        size: Number of replicas R, >= 1.
        device: Device on which the transport wants its tensors.
        transport: Carries what they exchange; None if they exchange nothing, or by means of their own.
    """

    rank: int
    size: int
    device: torch.device
    transport: Transport | None = field(default=None, compare=False)

    @classmethod
    def alone(cls, device: torch.device = CPU) -> Group:
        """Return the group of one replica, which exchanges nothing.

        Args:
            device: Device on which tensors to exchange are kept.
        """
        return cls(0, 1, device)

    @classmethod
    def over(cls, transport: Transport, rank: int, size: int) -> Group:
        """Return a group whose replicas exchange over a transport.

        Args:
            transport: Carries what they exchange.
            rank: This replica's place.
            size: Number of replicas.
        """
        return cls(rank, size, transport.device, transport)

    @property
    def is_alone(self) -> bool:
        """Whether the group is a single replica, which exchanges nothing."""
        return self.size == 1

    @property
    def connected(self) -> Transport:
        """The transport of a group of several replicas."""
        assert self.transport is not None, "a group that exchanges has a transport"
        return self.transport
