"""Shards of a replica, each process on a simulated GPU. As with NCCL, all-reduces run on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lp_runtime.distributed.reducers import Reducer
from lp_runtime.distributed.shards import ShardLink, ShardPlace
from lp_runtime.model.forward import fixed_passes
from lp_runtime.replica import loading
from support.simulated_gpu import Gpu, simulated_gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = (1, 8, 32)  # of captured passes; each capture takes a while
_host: list[Reducer] = []  # reduces simulated tensors, whose memory is on the host


@torch.library.custom_op("lp_stand_ins::all_reduce", mutates_args=())
def all_reduce(tensor: Tensor) -> Tensor:
    return _host[-1].all_reduce(tensor.clone())


@torch.library.custom_op("lp_stand_ins::all_gather", mutates_args=())
def all_gather(tensor: Tensor) -> Tensor:
    return _host[-1].all_gather(tensor.clone())


class DeviceReducer(Reducer):
    """Reduces on the device, with operations that a graph can capture."""

    can_capture = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return all_gather(tensor)


def link_on_devices(place: ShardPlace, device: torch.device, timeout: float) -> ShardLink:
    """Return a link that reduces tensors of the device."""
    link = ShardLink(place, CPU, timeout)
    _host.append(link.reducer)
    link.reducer = DeviceReducer()
    return link


@contextmanager
def gpu_of_a_shard() -> Iterator[Gpu]:
    """Make this process a shard with a simulated GPU, inside this context."""
    load, slices = loading.load_model, loading.slice_model

    def load_on_host(model, device, *others):
        return load(model, CPU, *others)

    def slice_and_move(model, link):
        slices(model, link)
        model.to(CUDA)

    with simulated_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_passes, "SIZES", SIZES)
        patch.setattr(fixed_passes, "MIN_LARGEST", SIZES[-1])
        patch.setattr(loading, "ShardLink", link_on_devices)
        patch.setattr(loading, "load_model", load_on_host)
        patch.setattr(loading, "slice_model", slice_and_move)
        yield gpu
