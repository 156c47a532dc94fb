"""What the shards of a replica say to each other: announcements of forward passes, and sums inside them.

A replica that spans P GPUs is P processes of one machine, its shards. Shard 0 is the replica: it alone decodes. The
others follow: it announces every forward pass, all run it on their slices of the model, and the slices' results are
summed or put together on the way.

Letters: P shards.
"""

from __future__ import annotations

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.process_group import environment, new_segment_name
from lp_runtime.distributed.shared_memory import FOLDER, SharedMemoryTransport
from lp_runtime.distributed.store import cannot_join, connect, wait_for_all
from lp_runtime.errors import LaunchError, ReplicaError, ShardError, first_line

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store
else:
    from torch.distributed import FileStore, PrefixStore, Store

STORES = ("-load", "-sums")  # behind a segment's name, the names of files in which the shards meet
WORD_BYTES = 8
BUFFER_WORDS = 1 << 16  # 512 KiB of each shard: most sums of a step take one round


@dataclass(frozen=True)
class ShardPlace:
    """Which shard of its replica a process is, and where the shards meet.

    Attributes:
        shard: 0 <= shard < num_shards; 0 is the one that decodes.
        num_shards: P.
        segment: name of the memory that the replica's shards share, which no other replica has; unused for one shard.
        step_timeout: seconds after which a shard that does not answer is an error.
    """

    shard: int = 0
    num_shards: int = 1
    segment: str = ""
    step_timeout: float = 60.0

    @property
    def is_whole(self) -> bool:
        """Whether the process holds the whole model."""
        return self.num_shards == 1

    @property
    def is_leader(self) -> bool:
        """Whether the process decodes; the other shards follow it."""
        return self.shard == 0


class Reducer(ABC):
    """Puts together what the shards of a replica have computed in a forward pass. All shards make the same calls in the
    same order, and all get the same result, bit for bit."""

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
        with _peers():
            yield from self._transport.rounds(words.numpy())

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        words = _as_words(tensor)
        found = torch.empty((self._num_shards, len(words)), dtype=torch.int64)
        for first, rows in self._rounds(words):
            found[:, first : first + rows.shape[1]] = torch.from_numpy(rows)
        return found.view(tensor.dtype)[:, : tensor.numel()].view(self._num_shards, *tensor.shape)


class CollectiveReducer(Reducer):
    """Sums over a process group of torch.distributed, in the order of its library.

    Args:
        group: of the replica's shards; not the default group, which replicas form and leave.
        num_shards: P.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int):
        self._group, self._num_shards = group, num_shards

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        with _peers():
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty((self._num_shards, *tensor.shape))
        with _peers():
            self._group.allgather([list(found.unbind())], [tensor.contiguous()]).wait()
        return found


class ShardLink:
    """The connection between the shards of a replica. Returns when all of them have come.

    Args:
        place: of this shard.
        device: of this shard's slice: sums travel over NCCL between GPUs, else over shared memory.
        timeout: seconds within which all shards must come.

    Attributes:
        place: see Args.
        reducer: for what is summed inside forward passes.

    Raises:
        LaunchError: if the shards do not meet.
    """

    def __init__(self, place: ShardPlace, device: torch.device, timeout: float):
        self.place = place
        self._transport = SharedMemoryTransport(
            place.segment, place.shard, place.num_shards, timeout, place.step_timeout, _never, BUFFER_WORDS
        )
        self.reducer: Reducer = SharedMemoryReducer(self._transport, place.num_shards)
        if device.type == "cuda":
            self.reducer = CollectiveReducer(shard_group(place, "nccl", timeout), place.num_shards)

    def announce(self, message: object) -> None:
        """Tell the followers what comes next; called by shard 0.

        Raises:
            ShardError: if a follower is gone.
        """
        with _peers():
            self._transport.broadcast(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), is_patient=False)

    def listen(self) -> object:
        """Return what shard 0 announces next; waits for it, however long that takes.

        Raises:
            ShardError: if shard 0, or another follower, is gone.
        """
        with _peers():
            return pickle.loads(self._transport.broadcast(None, is_patient=True))

    def smallest(self, number: int) -> int:
        """Return the smallest of all shards' integers."""
        with _peers():
            found = torch.empty(self.place.num_shards, dtype=torch.int64)
            self._transport.all_gather(found, torch.tensor([number]))
            return int(found.min())

    def close(self) -> None:
        """Leave; the other shards' later calls raise ShardError."""
        self._transport.close()


def meet_in_store(
    context: ReplicaContext, shard: int, num_shards: int, timeout: float, step_timeout: float
) -> ShardPlace:
    """Agree with the other shards of a replica that torchrun has started on where they meet.

    Args:
        context: of the replica, and the address of torchrun's store.
        shard: this process's.
        num_shards: P.
        timeout: seconds within which all shards must come.
        step_timeout: see ShardPlace.

    Raises:
        LaunchError: if they do not.
    """
    name = f"shards/{context.rank}"
    segment = _said_by_first(context, name, new_segment_name, timeout, is_first=shard == 0, num_ranks=num_shards)
    return ShardPlace(shard, num_shards, segment, step_timeout)


def said_by_first(world: ReplicaContext, name: str, value: Callable[[], str], timeout: float) -> str:
    """Return, on every rank that torchrun has started, what rank 0 has computed.

    Args:
        world: of this rank, with the address of torchrun's store.
        name: of what is computed.
        value: computes it; called on rank 0 alone.
        timeout: seconds within which all ranks must come, and rank 0 must have computed it.

    Raises:
        LaunchError: if they do not.
    """
    return _said_by_first(world, name, value, timeout, is_first=world.rank == 0, num_ranks=world.num_replicas)


def _said_by_first(
    context: ReplicaContext, name: str, value: Callable[[], str], timeout: float, is_first: bool, num_ranks: int
) -> str:
    try:
        store = connect(context, timeout)
        key = f"lp_runtime/{name}/{context.attempt}"
        # A script may start one runtime after another, in the same order on all ranks.
        key = f"{key}/{(store.add(f'{key}/came', 1) - 1) // num_ranks}"
        if is_first:
            store.set(key, value())
        found = store.get(key).decode()
        store.add(f"{key}/read", 1)
        wait_for_all(store, f"{key}/read", num_ranks, timeout, _never)  # the store may end with one of them
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error
    return found


def shard_group(place: ShardPlace, backend: str, timeout: float) -> dist.ProcessGroup:
    """Return a process group of a replica's shards, beside the default group and independent of it.

    Args:
        place: of this shard.
        backend: "nccl" or "gloo".
        timeout: seconds within which a shard must answer.

    Raises:
        LaunchError: if it does not form.
    """
    with _store(place, STORES[1], timeout) as store:
        group: dist.ProcessGroup
        if backend == "nccl":
            group = dist.ProcessGroupNCCL(store, place.shard, place.num_shards, dist.ProcessGroupNCCL.Options())  # type: ignore[assignment]
        else:
            group = dist.ProcessGroupGloo(store, place.shard, place.num_shards, timedelta(seconds=timeout))  # type: ignore[assignment]
        group.allreduce([torch.zeros(1, device="cuda" if backend == "nccl" else "cpu")]).wait()  # all have come
    return group


@contextmanager
def loading_group(place: ShardPlace, device: torch.device, timeout: float) -> Iterator[None]:
    """Make a replica's shards the default process group for the duration of a `with` block: transformers slices what
    it loads by a mesh of that group. Nothing but small objects travels in it.

    Args:
        place: of this shard.
        device: of this shard's slice.
        timeout: seconds within which all shards must come.

    Raises:
        LaunchError: if they do not.
    """
    # The library asks the environment for the GPU of a rank; shards are on one machine, whatever its name resolves to.
    variables = {"LOCAL_RANK": str(device.index or 0), "GLOO_SOCKET_IFNAME": "lo"}
    with _store(place, STORES[0], timeout) as store, environment(variables):
        dist.init_process_group(
            "gloo", store=store, rank=place.shard, world_size=place.num_shards, timeout=timedelta(seconds=timeout)
        )
        try:
            yield
            dist.barrier()  # the store is there until nobody needs it
        finally:
            dist.destroy_process_group()


def clear_up(segment: str) -> None:
    """Remove what shards that were killed while they met have left behind.

    Args:
        segment: see ShardPlace.
    """
    for name in ("", *STORES):
        (FOLDER / f"{segment}{name}").unlink(missing_ok=True)


@contextmanager
def _store(place: ShardPlace, name: str, timeout: float) -> Iterator[Store]:
    """Open a store for a replica's shards, which are all on this machine.

    Raises:
        LaunchError: if the shards do not meet in it.
    """
    path = FOLDER / f"{place.segment}{name}"
    try:
        store = FileStore(str(path), place.num_shards)
        store.set_timeout(timedelta(seconds=timeout))
        yield PrefixStore(name, store)
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"shard {place.shard} of {place.num_shards} could not meet the others: {first_line(error)}"
        ) from error
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _peers() -> Iterator[None]:
    """Raise what goes wrong with another shard as a ShardError; errors of this shard's own device pass through."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError, ShardError):
        raise
    except (ReplicaError, RuntimeError) as error:
        raise ShardError(f"a shard of the replica is gone: {first_line(error)}") from error


def _never() -> bool:
    return False


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
