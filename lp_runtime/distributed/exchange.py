"""The exchange: one fixed-size integer collective a step, which turns what each replica found into what all know.

What a replica sends, [3 + n * width] int64:

    digest | control | clock | what it found about the nodes it owns, `width` integers each | padding

Both sides of the layout are known to everyone (the partition is a pure function), n, too: as many nodes as any replica
owns in this step, rounded up. So nothing else is sent, and no size is ever agreed on.
Letters: R replicas, T nodes in the tree.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from lp_runtime.distributed.partition import Shares
from lp_runtime.errors import ReplicaError, StateMismatchError, first_line
from lp_runtime.utils.jit import bound, compiled, with_fresh_cache

HEADER = 3  # digest, control, clock
ROUNDED_TO = 16  # nodes


@dataclass(frozen=True)
class Outcome:
    """What every replica knows after the exchange.

    Attributes:
        values: [T, width] int64: what the node's owner found; -1 for pending tokens before the root.
        control: the bits that any replica set; they take effect at the end of this step, everywhere.
        clocks: [R] what each replica says of its time.
    """

    values: np.ndarray
    control: int
    clocks: list[int]


class Exchange:
    """The collective of a group of replicas; for one replica, a read-back.

    An exchange is begun with `start`, which waits for nothing where the values are on a GPU: what they are made by may
    still be running, and the collective is queued behind it. `finish` waits, once.

    Args:
        rank, num_replicas: as in the process group, which must have been formed for R > 1.
        capacity: largest number of nodes that a replica may own in a step.
        device: where the process group's backend wants its tensors.
        width: integers that are found of a node.
    """

    def __init__(self, rank: int, num_replicas: int, capacity: int, device: torch.device, width: int = 1):
        self.rank = rank
        self.num_replicas = num_replicas
        self.capacity = capacity
        self.width = width
        self.bytes_sent = 0  # by this replica so far
        self._on_gpu = device.type == "cuda"
        size = HEADER + capacity * width if num_replicas > 1 else 0
        self._sent = torch.zeros(size, dtype=torch.int64, device=device)
        self._received = torch.empty(num_replicas * size, dtype=torch.int64, device=device)
        # On a CPU numpy's views are the buffers themselves: its calls take a fraction of what torch's do.
        self._header = torch.empty(HEADER, dtype=torch.int64, pin_memory=True) if self._on_gpu else self._sent[:HEADER]
        self._header_values = self._header.numpy()
        self._sent_values = None if self._on_gpu else self._sent.numpy()
        self._received_values = None if self._on_gpu else self._received.numpy()
        self._copied: torch.cuda.Event | None = None  # made, like the next one, when a GPU's values are met
        self._pinned: torch.Tensor | None = None
        self._under_way: _PendingExchange | None = None

    def _size(self, shares: Shares) -> int:
        """Integers that each replica sends in a step."""
        most = max(shares.num_owned)
        assert most <= self.capacity
        return HEADER + min(-(-most // ROUNDED_TO) * ROUNDED_TO, self.capacity) * self.width

    def start(self, shares: Shares, values: torch.Tensor, digest: int, control: int, clock: int = 0) -> None:
        """Begin to exchange one step's results.

        Args:
            shares: everyone's share of T nodes.
            values: [n, width] int64, a row for each node that this replica owns, on its device.
            digest: digest of this replica's state, 56 bits.
            control: bits that this replica alone knows, and all must act on.
            clock: what this replica tells of its time.

        Raises:
            ReplicaError: if a peer is gone.
        """
        assert values.shape == (shares.num_owned[self.rank], self.width)
        size = 0
        if self.num_replicas > 1:
            size = self._size(shares)
            self._header_values[:] = digest, control, clock
        if self._on_gpu and size:
            self._sent[:HEADER].copy_(self._header, non_blocking=True)
            self._sent[HEADER : HEADER + values.numel()].copy_(values.reshape(-1))
            received = self._received[: self.num_replicas * size]
            self._gather(received, self._sent[:size])
            values = self._read_back(received)
        elif values.device.type == "cuda":
            values = self._read_back(values)
        else:
            values = values.cpu()
        self._under_way = _PendingExchange(shares, size, values, digest, control, clock)

    def _read_back(self, values: torch.Tensor) -> torch.Tensor:
        """Queue a copy of values to the host, where they are once `_copied` has happened."""
        if self._pinned is None or self._pinned.numel() < values.numel():
            room = max(self._received.numel(), self.capacity * self.width, values.numel())
            with torch.inference_mode(False):  # a caller may be in it now, and not later
                self._pinned = torch.empty(room, dtype=torch.int64, pin_memory=True)
            self._copied = torch.cuda.Event()
        here = self._pinned[: values.numel()].view(values.shape)
        here.copy_(values, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(values.device))
        return here

    def finish(self) -> Outcome:
        """Wait for what was begun.

        Raises:
            StateMismatchError: if the replicas' digests differ.
            ReplicaError: if a peer is gone or does not answer in time.
        """
        begun, self._under_way = self._under_way, None
        if self._copied is not None:
            self._copied.synchronize()  # what goes wrong here went wrong on this replica's GPU
        values = begun.values.numpy()
        if self.num_replicas == 1:  # it owns all nodes from the root on
            num_nodes = len(begun.shares.owner)
            merged, root = np.empty((num_nodes, self.width), np.int64), num_nodes - len(values)
            merged[:root], merged[root:] = -1, values
            return Outcome(merged, begun.control, [begun.clock])
        if self._on_gpu:
            rows = values
        else:
            self._sent_values[HEADER : HEADER + values.size] = values.reshape(-1)
            self._gather(self._received[: self.num_replicas * begun.size], self._sent[: begun.size])
            rows = self._received_values[: self.num_replicas * begun.size]
        return self._merge(begun, rows.reshape(self.num_replicas, -1))

    def _gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """What goes wrong here does so because a peer is gone, unless it is this replica's own device."""
        try:
            _all_gather(received, sent)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise ReplicaError(f"rank {self.rank} lost a peer in the exchange: {first_line(error)}") from error

    def _merge(self, begun: _PendingExchange, rows: np.ndarray) -> Outcome:
        """What all replicas' rows say together."""
        self.bytes_sent += 8 * begun.size
        digests, controls, clocks = zip(*rows[:, :HEADER].tolist(), strict=True)
        if any(each != begun.digest for each in digests):
            raise StateMismatchError(list(digests))
        merged = np.empty((len(begun.shares.owner), self.width), np.int64)
        _merge_kernel()(rows, begun.shares.owner, merged)
        return Outcome(merged, functools.reduce(operator.or_, controls), list(clocks))

    def all_gather(self, *args, **options) -> Outcome:
        """`start` and `finish` in one; the arguments are those of `start`."""
        self.start(*args, **options)
        return self.finish()


class _PendingExchange(NamedTuple):
    """An exchange that has begun: what `start` was given, how many integers each replica sends, and the values that are
    to be merged: this replica's own, or all that were received."""

    shares: Shares
    size: int
    values: torch.Tensor
    digest: int
    control: int
    clock: int


@functools.cache
def compile_exchange() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""
    with_fresh_cache(_merge_kernel)


@functools.cache
def _merge_kernel() -> Callable:
    """`_merge_owned` for arguments of its types."""
    rows = np.zeros((1, 1), np.int64)
    return bound(_merge_owned, rows, np.zeros(1, np.int64), rows)


@compiled(makes_arrays=True)
def _merge_owned(rows, owner, merged):
    """Gather what the owners say of each node, [T, width]; -1 where there is no owner.

    Args:
        rows: [R, HEADER + n * width] what they sent, of the nodes that each owns in the order of the tree.
        owner: [T] see Shares.
    """
    num_nodes, width = merged.shape
    places = np.full(len(rows), HEADER, np.int64)
    for node in range(num_nodes):
        rank = owner[node]
        for i in range(width):
            merged[node, i] = rows[rank, places[rank] + i] if rank >= 0 else -1
        if rank >= 0:
            places[rank] += width


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


def gather_rows(row: np.ndarray, num_replicas: int, device: torch.device) -> np.ndarray:
    """Every replica's row, [R, n], on all of them. When a runtime starts, never inside a step.

    Args:
        row: [n] int64, of the same n everywhere.
        num_replicas: R.
        device: where the process group's backend wants its tensors.
    """
    if num_replicas == 1:
        return row[None]
    mine = torch.from_numpy(row).to(device)
    rows = torch.empty(num_replicas * len(row), dtype=torch.int64, device=device)
    try:
        _all_gather(rows, mine)
        return rows.cpu().numpy().reshape(num_replicas, -1)
    except RuntimeError as error:
        raise ReplicaError(f"lost a peer: {first_line(error)}") from error
