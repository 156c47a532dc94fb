"""The exchange: one fixed-size integer collective a step, which turns what each replica found into what all know.

What a replica sends, [2 + capacity] int64:

    digest | control | what it found about the nodes it owns, in the tree's order | padding

Both sides of the layout are known to everyone (the partition is a pure function), so nothing else is sent.
Letters: R replicas, T nodes in the tree.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lp_runtime.errors import ReplicaError, StateMismatchError, first_line
from lp_runtime.parallel.partition import Share

HEADER = 2  # digest, control


@dataclass(frozen=True)
class Outcome:
    """What every replica knows after the exchange.

    Attributes:
        values: [T] what the node's owner found; -1 for pending tokens before the root.
        control: the bits that any replica set; they take effect at the end of this step, everywhere.
    """

    values: list[int]
    control: int


class Exchange:
    """The collective of a group of replicas; for one replica, a read-back.

    Args:
        rank, num_replicas: as in the process group, which must have been formed for R > 1.
        capacity: largest number of nodes that a replica may own in a step.
        device: where the process group's backend wants its tensors.
    """

    def __init__(self, rank: int, num_replicas: int, capacity: int, device: torch.device):
        self.rank = rank
        self.num_replicas = num_replicas
        self.capacity = capacity
        self._device = device
        size = HEADER + capacity
        pinned = device.type == "cuda"
        self._header = torch.empty(HEADER, dtype=torch.int64, pin_memory=pinned)
        self._sent = torch.zeros(size, dtype=torch.int64, device=device)
        self._received = torch.empty(num_replicas * size, dtype=torch.int64, device=device)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one replica sends in a step."""
        return self._sent.numel() * self._sent.element_size()

    def all_gather(
        self, shares: Sequence[Share], num_nodes: int, values: torch.Tensor, digest: int, control: int
    ) -> Outcome:
        """Exchange one step's results.

        Args:
            shares: [R] everyone's share.
            num_nodes: T.
            values: int64, one for each node that this replica owns, on its device; read back here, once.
            digest: digest of this replica's state, 56 bits.
            control: bits that this replica alone knows, and all must act on.

        Raises:
            StateMismatchError: if the replicas' digests differ.
            ReplicaError: if a peer is gone or does not answer in time.
        """
        num_sent = len(values)
        assert num_sent == len(shares[self.rank].owned) <= self.capacity
        self._header[0], self._header[1] = digest, control
        self._sent[:HEADER].copy_(self._header, non_blocking=True)
        self._sent[HEADER : HEADER + num_sent].copy_(values)
        if self.num_replicas == 1:
            rows = [self._sent.tolist()]
        else:
            try:
                _all_gather(self._received, self._sent)
                received = self._received.tolist()
            except RuntimeError as error:
                raise ReplicaError(f"rank {self.rank} lost a peer in the exchange: {first_line(error)}") from error
            size = HEADER + self.capacity
            rows = [received[start : start + size] for start in range(0, len(received), size)]
        digests = [row[0] for row in rows]
        if digests.count(digest) != len(digests):
            shown = ", ".join(f"rank {rank} {value:#x}" for rank, value in enumerate(digests))
            raise StateMismatchError(f"the replicas' states have parted, their digests differ: {shown}")
        merged = [-1] * num_nodes
        for share, row in zip(shares, rows, strict=True):
            for node, value in zip(share.owned, row[HEADER:], strict=False):
                merged[node] = value
        return Outcome(merged, functools.reduce(operator.or_, (row[1] for row in rows)))


def _all_gather(output: torch.Tensor, value: torch.Tensor) -> None:
    # all_gather_into_tensor until torch 2.12; all_gather_single is its name from 2.13 on
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, value)


def broadcast_object(value: Any, context_rank: int, num_replicas: int, device: torch.device) -> Any:
    """Rank 0's `value` on every replica. Once a request; once a step only where a caller's own criteria must be asked.

    Args:
        value: anything that pickles; read on rank 0 only.
        context_rank, num_replicas: this replica and how many there are.
        device: where the process group's backend wants its tensors.
    """
    if num_replicas == 1:
        return value
    try:
        if context_rank == 0:
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
            size = torch.tensor([len(data)], dtype=torch.int64, device=device)
            dist.broadcast(size, src=0)
            dist.broadcast(data, src=0)
            return value
        size = torch.empty(1, dtype=torch.int64, device=device)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(data, src=0)
    except RuntimeError as error:
        raise ReplicaError(f"rank {context_rank} lost a peer: {first_line(error)}") from error
    return pickle.loads(data.cpu().numpy().tobytes())


def merge_rows(rows: torch.Tensor, num_replicas: int, device: torch.device) -> torch.Tensor:
    """Rows that one replica each has, on all of them. At a request's end, never inside a step.

    Args:
        rows: [n, V] floating point; -inf where another replica has the row.
        num_replicas: how many there are.
        device: where the process group's backend wants its tensors.
    """
    if num_replicas == 1:
        return rows
    merged = rows.to(device)
    try:
        dist.all_reduce(merged, op=dist.ReduceOp.MAX)
    except RuntimeError as error:
        raise ReplicaError(f"lost a peer: {first_line(error)}") from error
    return merged.to(rows.device)
