"""Exchange: one all-gather of integers per step that gives every replica the results of all nodes.

A replica sends one row, [3 + n * width] int64:

    digest and rank | control | clock | results of the nodes that it owns, `width` integers each | padding

n is the largest number of nodes that a replica owns in the step, rounded up. The partition is a pure function, so every
replica knows who owns which nodes, and a row carries no indices and no sizes.

Letters: R replicas, T nodes in the tree.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ReplicaError, StateMismatchError
from lp_runtime.utils.jit import bound, compiled, compiles

HEADER = 3  # integers before the results: digest and rank, control, clock
DIGEST_BITS = 56  # low bits of the first integer; the rank above them reveals rows in the wrong order
NUM_SENT_RANKS = 1 << 7  # the 7 bits above the digest hold the rank modulo this; the sign bit stays 0
NODES_ROUNDED_TO = 16  # limits the number of different message sizes

T = TypeVar("T")


class Outcome(NamedTuple):
    """Result of an exchange, equal on every replica."""

    values: np.ndarray  # [T, width] int64 results of all nodes, each from its owner; -1 for those before the root
    control: int  # union of all replicas' control bits; they take effect at the end of the step, on all replicas
    clocks: list[int]  # [R]


class _PendingExchange(NamedTuple):
    """State of an exchange between `start` and `finish`."""

    shares: Shares
    num_sent: int  # integers that each replica sends; 0 for a single replica
    # This replica's results, [n, width]; after a gather on GPUs, all rows, [R * num_sent]. A GPU may still write them.
    values: np.ndarray
    merged: np.ndarray  # [T, width] int64, to be filled with the results of all nodes
    digest: int
    control: int
    clock: int


class Exchange:
    """Gathers a step's results from all replicas of a group; a single replica reads back its own.

    `start` begins an exchange and `finish` ends it. If the results are on a GPU, `start` does not wait: the gather is
    queued after the kernels that compute the results, and `finish` waits once.
    """

    def __init__(self, group: Group, capacity: int, width: int = 1, sleeps: bool = False):
        self.group = group
        self.capacity = capacity  # largest number of nodes that a replica may own in a step
        self.width = width  # integers per node result
        self.bytes_sent = 0  # by this replica so far; 0 for a single replica
        self._sleeps = sleeps  # instead of polling, during a wait for the GPU
        device = group.device
        self._on_gpu = device.type == "cuda"
        size = 0 if group.is_alone else HEADER + capacity * width
        self._sent = torch.zeros(size, dtype=torch.int64, device=device)
        self._received = torch.empty(group.size * size, dtype=torch.int64, device=device)
        # On CPUs, numpy views of the buffers: numpy calls on such small arrays are several times faster than torch's.
        self._header = torch.empty(HEADER, dtype=torch.int64, pin_memory=True) if self._on_gpu else self._sent[:HEADER]
        self._header_values = self._header.numpy()
        self._sent_values = None if self._on_gpu else self._sent.numpy()
        self._received_values = None if self._on_gpu else self._received.numpy()
        self._copied: torch.cuda.Event | None = None  # created with `_pinned` by the first results on a GPU
        self._pinned: torch.Tensor | None = None
        self._pending: _PendingExchange | None = None

    def start(self, shares: Shares, values: torch.Tensor, digest: int, control: int, clock: int = 0) -> None:
        """Begin to exchange one step's results.

        Args:
            shares: shares of all replicas in the step's T nodes.
            values: [n, width] int64 results, a row for each node that this replica owns, on its device.
            digest: 56-bit digest of this replica's state.
            control: bits that only this replica knows and all must act on.
            clock: this replica's clock value for the others.
        """
        assert values.shape == (shares.num_owned[self.group.rank], self.width)
        num_sent = 0
        if not self.group.is_alone:
            most = max(shares.num_owned)
            assert most <= self.capacity
            num_sent = HEADER + min(-(-most // NODES_ROUNDED_TO) * NODES_ROUNDED_TO, self.capacity) * self.width
            self._header_values[:] = digest | self.group.rank % NUM_SENT_RANKS << DIGEST_BITS, control, clock
        if self._on_gpu and num_sent:
            self._sent[:HEADER].copy_(self._header, non_blocking=True)
            self._sent[HEADER : HEADER + values.numel()].copy_(values.reshape(-1))
            received = self._received[: self.group.size * num_sent]
            self.group.connected.all_gather(received, self._sent[:num_sent])
            values = self._read_back(received)
        elif values.device.type == "cuda":
            values = self._read_back(values)
        else:
            values = values.cpu()
        # Made here rather than in `finish`, which a GPU waits for.
        merged = np.full((len(shares.owner), self.width), -1, np.int64)
        self._pending = _PendingExchange(shares, num_sent, values.numpy(), merged, digest, control, clock)

    def _read_back(self, values: torch.Tensor) -> torch.Tensor:
        """Queue a copy of int64 `values` to pinned memory, valid until the next call; `_copied` marks its end."""
        if self._pinned is None or self._pinned.numel() < values.numel():
            capacity = max(self._received.numel(), self.capacity * self.width, values.numel())
            with torch.inference_mode(False):  # later calls may be outside inference mode and must be able to write it
                self._pinned = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
            self._copied = torch.cuda.Event(blocking=self._sleeps)
        assert self._copied is not None
        host_values = self._pinned[: values.numel()].view(values.shape)
        host_values.copy_(values, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(values.device))
        return host_values

    def finish(self) -> Outcome:
        """Wait for the exchange that `start` began; raise StateMismatchError if the replicas' digests differ."""
        pending, self._pending = self._pending, None
        assert pending is not None, "start comes first"
        if self._copied is not None:
            if self.group.transport is None:
                self._copied.synchronize()  # an error here is one of this replica's GPU
            else:
                self.group.transport.wait(self._copied)
        values, merged = pending.values, pending.merged
        if self.group.is_alone:  # a single replica owns all nodes from the root on
            merged[len(merged) - len(values) :] = values
            return Outcome(merged, pending.control, [pending.clock])
        if self._sent_values is None or self._received_values is None:  # on a GPU, `start` has queued the gather
            rows = values
        else:
            self._sent_values[HEADER : HEADER + values.size] = values.reshape(-1)
            num_received = self.group.size * pending.num_sent
            self.group.connected.all_gather(self._received[:num_received], self._sent[: pending.num_sent])
            rows = self._received_values[:num_received]
        return self._merge(pending, rows.reshape(self.group.size, -1))

    def _merge(self, pending: _PendingExchange, rows: np.ndarray) -> Outcome:
        """Check the rows of all replicas, [R, n] int64, and merge them into the outcome."""
        self.bytes_sent += 8 * pending.num_sent
        words, controls, clocks = zip(*rows[:, :HEADER].tolist(), strict=True)
        ranks = [word >> DIGEST_BITS for word in words]
        if ranks != [rank % NUM_SENT_RANKS for rank in range(len(rows))]:
            raise ReplicaError(f"rank {self.group.rank} received the replicas' rows in the order {ranks}")
        digests = [word & (1 << DIGEST_BITS) - 1 for word in words]
        if digests.count(pending.digest) < len(digests):
            raise StateMismatchError(digests)
        _merge_kernel()(rows, pending.shares.owner, pending.merged)
        return Outcome(pending.merged, functools.reduce(operator.or_, controls), list(clocks))

    def all_gather(self, shares: Shares, values: torch.Tensor, digest: int, control: int) -> Outcome:
        """Exchange one step's results: `start` and `finish` in one call."""
        self.start(shares, values, digest, control)
        return self.finish()


@compiles
def compile_exchange() -> None:
    _merge_kernel()


@functools.cache
def _merge_kernel() -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    rows = np.zeros((1, 1), np.int64)
    return bound(_merge_owned, rows, np.zeros(1, np.int64), rows)


@compiled(makes_arrays=True)
def _merge_owned(rows, owner, merged):
    """Write each node's result, as its owner sent it, to `merged`, [T, width]; nothing if a node has no owner.

    `rows` are all replicas' rows, [R, HEADER + n * width], with results in the order of the tree's nodes.
    """
    num_nodes, width = merged.shape
    places = np.full(len(rows), HEADER, np.int64)
    for node in range(num_nodes):
        rank = owner[node]
        if rank < 0:
            continue
        for i in range(width):
            merged[node, i] = rows[rank, places[rank] + i]
        places[rank] += width


def broadcast_object(value: T, group: Group) -> T:
    """Return rank 0's picklable value on every replica."""  # once per request, or per step with a caller's criteria
    if group.is_alone:
        return value
    data = group.connected.broadcast(pickle.dumps(value) if group.rank == 0 else None, is_patient=False)
    return value if group.rank == 0 else pickle.loads(data)


def merge_rows(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """Combine rows that are spread over the replicas, on all of them. For a request's end, not for steps.

    `rows` is [n, V] floating point, -inf in rows that another replica has. The result has the same shape and device.
    """
    if group.is_alone:
        return rows
    exact = rows.contiguous().to(torch.float64)  # exact for all other float types, and sent as int64 bits
    theirs = gather_rows(exact.view(torch.int64).flatten().cpu().numpy(), group)
    merged = torch.from_numpy(theirs.view(np.float64)).reshape(group.size, *rows.shape).amax(0)
    return merged.to(rows.device, rows.dtype)


def gather_rows(row: np.ndarray, group: Group) -> np.ndarray:
    """All-gather an int64 row, [n], of every replica to [R, n], when a runtime or a request starts."""
    if group.is_alone:
        return row[None]
    sent = torch.from_numpy(row).to(group.device)
    received = torch.empty(group.size * len(row), dtype=torch.int64, device=group.device)
    group.connected.all_gather(received, sent)
    return received.cpu().numpy().reshape(group.size, -1)
