"""A simulated GPU of a given size, which counts the bytes of living tensors and runs out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from support.simulated_gpu import Gpu, simulated_gpu


class GpuMemory:
    """The memory of a simulated GPU.

    Attributes:
        total: size in bytes.
        peak: largest number of living bytes since `reset_peak`.
    """

    def __init__(self, total: int):
        self.total = total
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live(self) -> int:
        """Bytes of living tensors; a storage that views share counts once."""
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        return sum(size for _, size in self._storages.values())

    def note(self, memory: torch.Tensor) -> None:
        """Count an allocation; raise OutOfMemoryError if it does not fit."""
        storage = memory.untyped_storage()
        if storage._cdata in self._storages and not self._storages[storage._cdata][0].expired():
            return
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        live = self.live
        if live > self.total:
            del self._storages[storage._cdata]
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes.")
        self.peak = max(self.peak, live)

    def reset_peak(self) -> None:
        self.peak = self.live


@contextlib.contextmanager
def gpu_of_size(total: int) -> Iterator[tuple[Gpu, GpuMemory]]:
    """Simulate a GPU of `total` bytes."""
    memory = GpuMemory(total)
    functions = {
        "mem_get_info": lambda device=None: (memory.total - memory.live, memory.total),
        "memory_allocated": lambda device=None: memory.live,
        "memory_reserved": lambda device=None: memory.live,
        "max_memory_allocated": lambda device=None: memory.peak,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
    }
    with simulated_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        gpu.note = memory.note
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        yield gpu, memory
