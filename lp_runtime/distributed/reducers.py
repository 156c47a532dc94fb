"""All-reduce and all-gather inside forward passes of a replica that spans several GPUs, its P shards."""

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
from lp_runtime.utils.memory import is_out_of_memory

WORD_BYTES = 8
ALIGNMENT = 16  # bytes: torch's one-shot kernel reads in units of this size


class Reducer(ABC):
    """Combines tensors of a replica's shards during a forward pass.

    All shards must make the same calls in the same order; all get bitwise equal results. A call that waits on the host
    raises PassFailedError if another shard gives up the pass. One that waits on the GPU cannot be given up.
    """

    can_capture = False  # whether CUDA graphs may contain the calls; they then wait on the GPU
    num_calls = 0  # so far, that wait on the GPU

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all shards' tensors, which have the same shape. The argument may be overwritten."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all shards' tensors, which have the same shape, stacked by shard: [P, ...]."""


class SharedMemoryReducer(Reducer):
    """Reduces CPU tensors over shared memory. 16-bit tensors are summed in float32 and rounded once."""

    def __init__(self, transport: SharedMemoryTransport, num_shards: int):
        self._transport, self._num_shards = transport, num_shards

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        words, dtype = _as_words(tensor), tensor.dtype
        total = torch.empty_like(words)
        for first, rows in self._rounds(words):
            values = torch.from_numpy(rows).view(dtype)
            part = total[first : first + rows.shape[1]].view(dtype)
            # Added one by one, for a fixed order: in torch.sum it depends on the sizes.
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
        gathered = torch.empty((self._num_shards, len(words)), dtype=torch.int64)
        for first, rows in self._rounds(words):
            gathered[:, first : first + rows.shape[1]] = torch.from_numpy(rows)
        return gathered.view(tensor.dtype)[:, : tensor.numel()].view(self._num_shards, *tensor.shape)


class HostReducer(Reducer):
    """Reduces GPU tensors in host memory, with a reducer for CPU tensors."""

    def __init__(self, host: Reducer):
        self._host = host

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_reduce(tensor.cpu()).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_gather(tensor.cpu()).to(tensor.device)


class CollectiveReducer(Reducer):
    """Reduces with NCCL or gloo; the library decides the order of a sum."""

    def __init__(self, group: dist.ProcessGroup, num_shards: int, can_capture: bool = False):
        self._group = group  # of the replica's shards; the default group is that of the replicas
        self._num_shards = num_shards
        self.can_capture = can_capture  # with NCCL

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self.num_calls += 1
        with peers():
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered, tensor = tensor.new_empty((self._num_shards, *tensor.shape)), tensor.contiguous()
        self.num_calls += 1
        with peers():
            self._group.allgather([list(gathered.unbind())], [tensor]).wait()
        return gathered


class OneShotReducer(Reducer):
    """Sums small tensors in one kernel that reads all shards' GPU memory, others with another reducer.

    A ring all-reduce has 2 (P - 1) consecutive transfers. For small tensors it is faster that every GPU reads the
    tensors of all others at once: P - 1 times as much data, but a single wait. All shards add in the same order.
    """

    can_capture = True

    def __init__(self, others: Reducer, buffer: torch.Tensor, group_name: str):
        self._others = others  # for larger tensors and for all_gather
        self._buffer = buffer  # [n] this shard's part of torch's symmetric memory, which all shards' GPUs can read
        self._group_name = group_name  # of that memory
        self.max_numbers = len(buffer)  # largest number of elements that is summed in one shot; at most n
        self._num_shots = 0

    @property
    def num_calls(self) -> int:  # type: ignore[override]  # an attribute of the base class
        return self._num_shots + self._others.num_calls

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size, flat = tensor.numel(), tensor.contiguous().view(-1)
        is_aligned = not any(each * flat.element_size() % ALIGNMENT for each in (size, flat.storage_offset()))
        if tensor.dtype != self._buffer.dtype or size > self.max_numbers or not is_aligned:
            return self._others.all_reduce(tensor)
        buffer = self._buffer[:size]  # torch sums all elements of the buffer
        self._num_shots += 1
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", self._group_name)
        return total.view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._others.all_gather(tensor)


@contextmanager
def peers() -> Iterator[None]:
    """Convert errors from another shard to ShardError; errors of this shard's own device and memory pass through."""
    try:
        yield
    except ShardError:
        raise
    except (ReplicaError, RuntimeError) as error:
        if isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
            raise
        raise ShardError(f"a shard of the replica is gone: {first_line(error)}") from error


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as [n] int64; a zero-padded copy if it is not contiguous or aligned."""
    flat = tensor.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % WORD_BYTES == 0 and flat.data_ptr() % WORD_BYTES == 0:
        with contextlib.suppress(RuntimeError):  # a view whose offset in its storage is not a multiple of 8 bytes
            return flat.view(torch.int64)
    words = torch.zeros(-(-num_bytes // WORD_BYTES), dtype=torch.int64)
    words.view(tensor.dtype)[: flat.numel()] = flat
    return words
