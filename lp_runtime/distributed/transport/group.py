"""Group of replicas that share a request's steps. Does not import torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lp_runtime.distributed.transport.transport import Transport

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """Replicas that share a request's steps, from the view of one of them."""

    rank: int  # of this replica, 0 <= rank < size
    size: int  # number of replicas R, >= 1
    device: torch.device  # on which the transport expects its tensors
    transport: Transport | None = field(default=None, compare=False)  # None if nothing is exchanged over one

    @classmethod
    def alone(cls, device: torch.device = CPU) -> Group:
        """Return the group of a single replica; its exchange buffers are on `device`."""
        return cls(0, 1, device)

    @classmethod
    def over(cls, transport: Transport, rank: int, size: int) -> Group:
        return cls(rank, size, transport.device, transport)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def connected(self) -> Transport:
        assert self.transport is not None, "a group that exchanges has a transport"
        return self.transport
