"""Sums inside the forward passes of a replica that spans several GPUs.

Letters: P shards.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from lp_runtime.distributed.transport.shared_memory import SharedMemoryTransport
from lp_runtime.errors import ReplicaError, ShardError, first_line

WORD_BYTES = 8
ALIGNMENT = 16  # bytes that torch's kernel reads at once


class Reducer(ABC):
    """Puts together what the shards of a replica have computed in a forward pass. All shards make the same calls in the
    same order, and all get the same result, bit for bit.

    Attributes:
        can_capture: whether a CUDA graph may contain the calls.
    """

    can_capture = False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all shards' tensors, of one shape; the argument may be overwritten."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all shards' tensors, of one shape, stacked in the order of shards: [P, ...]."""


class SharedMemoryReducer(Reducer):
    """Sums over memory that the shards share, on CPUs. Half precision is summed in float32 and rounded once.

    Args:
        transport: between the shards.
        num_shards: P.
    """

    def __init__(self, transport: SharedMemoryTransport, num_shards: int):
        self._transport, self._num_shards = transport, num_shards

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        words, dtype = _as_words(tensor), tensor.dtype
        total = torch.empty_like(words)
        for first, rows in self._rounds(words):
            values = torch.from_numpy(rows).view(dtype)
            part = total[first : first + rows.shape[1]].view(dtype)
            # One by one: torch chooses the order of its own sums by the sizes.
            summed = torch.add(values[0].float(), values[1]) if dtype.itemsize < 4 else torch.add(values[0], values[1])
            for row in values[2:]:
                summed += row
            part.copy_(summed)
        return total.view(dtype)[: tensor.numel()].view(tensor.shape)

    def _rounds(self, words: torch.Tensor) -> Iterator[tuple[int, np.ndarray]]:
        with peers():
            yield from self._transport.rounds(words.numpy())

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        words = _as_words(tensor)
        found = torch.empty((self._num_shards, len(words)), dtype=torch.int64)
        for first, rows in self._rounds(words):
            found[:, first : first + rows.shape[1]] = torch.from_numpy(rows)
        return found.view(tensor.dtype)[:, : tensor.numel()].view(self._num_shards, *tensor.shape)


class HostReducer(Reducer):
    """Sums in host memory what lies on GPUs.

    Args:
        host: sums there.
    """

    def __init__(self, host: Reducer):
        self._host = host

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_reduce(tensor.cpu()).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_gather(tensor.cpu()).to(tensor.device)


class CollectiveReducer(Reducer):
    """Sums over a process group of torch.distributed, in the order of its library.

    Args:
        group: of the replica's shards; not the default group, which replicas form and leave.
        num_shards: P.
        can_capture: see Reducer; NCCL's calls may be captured, gloo's not.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int, can_capture: bool = False):
        self._group = group
        self._num_shards = num_shards
        self.can_capture = can_capture

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        with peers():
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty((self._num_shards, *tensor.shape))
        with peers():
            self._group.allgather([list(found.unbind())], [tensor.contiguous()]).wait()
        return found


class OneShotReducer(Reducer):
    """Sums small tensors in one kernel, which reads the memory of all shards' GPUs; others as another reducer does.

    A ring passes a sum on 2 (P - 1) times, each of which waits for the one before. What is small is read from everybody
    at once instead: a GPU reads P - 1 times as much, and waits once. All shards add in the same order.

    Args:
        others: sums what is larger, and gathers.
        buffer: [n] this shard's part of memory that the GPUs of all shards read (torch's symmetric memory).
        group_name: under which the shards have made that memory known to each other.

    Attributes:
        max_numbers: of a tensor that is summed in one shot; at most n.
    """

    can_capture = True

    def __init__(self, others: Reducer, buffer: torch.Tensor, group_name: str):
        self._others = others
        self._buffer = buffer
        self._group_name = group_name
        self.max_numbers = len(buffer)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size, flat = tensor.numel(), tensor.contiguous().view(-1)
        is_aligned = not any(each * flat.element_size() % ALIGNMENT for each in (size, flat.storage_offset()))
        if tensor.dtype != self._buffer.dtype or size > self.max_numbers or not is_aligned:
            return self._others.all_reduce(tensor)
        buffer = self._buffer[:size]  # torch sums as many numbers as the buffer has
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", self._group_name)
        return total.view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._others.all_gather(tensor)


@contextmanager
def peers() -> Iterator[None]:
    """Raise what goes wrong with another shard as a ShardError; errors of this shard's own device pass through."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError, ShardError):
        raise
    except (ReplicaError, RuntimeError) as error:
        raise ShardError(f"a shard of the replica is gone: {first_line(error)}") from error


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as [n] int64; a copy where it is not contiguous or no multiple of 8 bytes."""
    flat = tensor.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % WORD_BYTES == 0 and flat.data_ptr() % WORD_BYTES == 0:
        with contextlib.suppress(RuntimeError):  # a view whose place in its storage is odd
            return flat.view(torch.int64)
    words = torch.zeros(-(-num_bytes // WORD_BYTES), dtype=torch.int64)
    words.view(tensor.dtype)[: flat.numel()] = flat
    return words
