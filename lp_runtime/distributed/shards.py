"""What the shards of a replica say to each other: announcements of forward passes; sums inside them: reducers.py.

A replica that spans P GPUs is P processes of one machine, its shards. Shard 0 is the replica: it alone decodes. The
others follow: it announces every forward pass, all run it on their slices of the model, and the slices' results are
summed or put together on the way.

Letters: P shards.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.devices import gpu_number
from lp_runtime.distributed.process_group import environment, new_segment_name
from lp_runtime.distributed.reducers import CollectiveReducer, HostReducer, Reducer, SharedMemoryReducer, peers
from lp_runtime.distributed.store import cannot_join, connect, wait_for_all
from lp_runtime.distributed.transport.shared_memory import FOLDER, SharedMemoryTransport
from lp_runtime.errors import LaunchError, first_line

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store
else:
    from torch.distributed import FileStore, PrefixStore, Store

log = logging.getLogger(__name__)

STORES = ("-load", "-sums", "-peers")  # behind a segment's name, the names of files in which the shards meet
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


class ShardLink:
    """The connection between the shards of a replica. Returns when all of them have come.

    Args:
        place: of this shard.
        device: of this shard's slice: sums travel over NCCL between GPUs; over shared memory between CPUs, and where
            two shards share a GPU.
        timeout: seconds within which all shards must come.

    Attributes:
        place: see Args.
        reducer: for what is summed inside forward passes; may be replaced before the first pass.

    Raises:
        LaunchError: if the shards do not meet.
        ShardError: if one of them is gone before they have said which GPUs they have.
    """

    def __init__(self, place: ShardPlace, device: torch.device, timeout: float):
        self.place = place
        self._transport = SharedMemoryTransport(
            place.segment, place.shard, place.num_shards, timeout, place.step_timeout, _never, BUFFER_WORDS
        )
        self.reducer: Reducer = SharedMemoryReducer(self._transport, place.num_shards)
        if device.type == "cuda":
            self.reducer = self._device_reducer(device, timeout)

    def _device_reducer(self, device: torch.device, timeout: float) -> Reducer:
        """Return what sums between GPUs: NCCL, or the host where two shards share a GPU, which NCCL refuses."""
        mine = torch.tensor([gpu_number(device)])
        found = torch.empty(self.place.num_shards, dtype=torch.int64)
        with peers():
            self._transport.all_gather(found, mine)
        if len(found.unique()) < len(found):
            return HostReducer(self.reducer)
        group = shard_group(self.place, "nccl", timeout)
        return CollectiveReducer(group, self.place.num_shards, can_capture=True)

    def announce(self, message: object) -> None:
        """Tell the followers what comes next; called by shard 0.

        Raises:
            ShardError: if a follower is gone.
        """
        with peers():
            self._transport.broadcast(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), is_patient=False)

    def listen(self) -> object:
        """Return what shard 0 announces next; waits for it, however long that takes.

        Raises:
            ShardError: if shard 0, or another follower, is gone.
        """
        with peers():
            return pickle.loads(self._transport.broadcast(None, is_patient=True))

    def smallest(self, number: int) -> int:
        """Return the smallest of all shards' integers."""
        with peers():
            found = torch.empty(self.place.num_shards, dtype=torch.int64)
            self._transport.all_gather(found, torch.tensor([number]))
            return int(found.min())

    def peer_buffer(self, size: int, dtype: torch.dtype, device: torch.device, timeout: float) -> torch.Tensor | None:
        """Allocate memory that the GPUs of all shards read: torch's symmetric memory. All shards call this together.

        Args:
            size: numbers of each shard's part.
            dtype: of these.
            device: of this shard.
            timeout: seconds within which all shards must come.

        Returns:
            [size] this shard's part, whose name is the segment's; None on all shards where one cannot have it: GPUs do
            not reach one another, or this torch has no such memory.
        """
        buffer, place = None, self.place
        with _store(place, STORES[2], timeout) as store:
            try:
                buffer = _symmetric_memory(place, store, size, dtype, device)
            except Exception as error:  # torch says in many ways that there is no way between two GPUs
                log.info("no memory that the GPUs of a replica share: %s", first_line(error))
            has_all = self.smallest(buffer is not None)  # the store is there until nobody needs it
        return buffer if has_all else None

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
    # NCCL's monitor would look into the store, which is gone once all have come, and keep a shard from ending.
    unwatched = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with _store(place, STORES[1], timeout) as store, environment(unwatched), _meeting(place):
        group: dist.ProcessGroup
        if backend == "nccl":
            group = dist.ProcessGroupNCCL(store, place.shard, place.num_shards, dist.ProcessGroupNCCL.Options())  # type: ignore[assignment]
        else:
            group = dist.ProcessGroupGloo(store, place.shard, place.num_shards, timedelta(seconds=timeout))  # type: ignore[assignment]
        group.allreduce([torch.zeros(1, device="cuda" if backend == "nccl" else "cpu")]).wait()  # all have come
    return group


def _symmetric_memory(
    place: ShardPlace, store: Store, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return this shard's part of symmetric memory, [size]; raises whatever torch raises without."""
    # Its public face wants a group of the default group's; torch looks ours up by its name.
    from torch._C._distributed_c10d import _register_process_group as register
    from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory

    group = dist.ProcessGroup(store, place.shard, place.num_shards)
    register(place.segment, group)  # type: ignore[arg-type]  # a name of torch's own type, which is a str
    SymmetricMemory.set_group_info(place.segment, place.shard, place.num_shards, store)
    buffer = SymmetricMemory.empty_strided_p2p((size,), (1,), dtype, device, place.segment)
    SymmetricMemory.rendezvous(buffer, place.segment)
    return buffer


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
        with _meeting(place):
            dist.init_process_group(
                "gloo", store=store, rank=place.shard, world_size=place.num_shards, timeout=timedelta(seconds=timeout)
            )
        try:
            yield
            with _meeting(place):
                dist.barrier()  # the store is there until nobody needs it
        finally:
            dist.destroy_process_group()


def clear_up(segment: str) -> None:
    """Remove what shards that were killed while they met have left behind.

    Args:
        segment: see ShardPlace.
    """
    for name in ("", *STORES):
        with contextlib.suppress(OSError):  # not there, or on a read-only file system where it never was
            (FOLDER / f"{segment}{name}").unlink()


@contextmanager
def _store(place: ShardPlace, name: str, timeout: float) -> Iterator[Store]:
    """Open a store for a replica's shards, which are all on this machine.

    Raises:
        LaunchError: if the store cannot be opened.
    """
    path = FOLDER / f"{place.segment}{name}"
    try:
        with _meeting(place):
            store = FileStore(str(path), place.num_shards)
            store.set_timeout(timedelta(seconds=timeout))
        yield PrefixStore(name, store)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _meeting(place: ShardPlace) -> Iterator[None]:
    """Raise LaunchError in place of what torch raises when the shards of a replica do not meet."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"shard {place.shard} of {place.num_shards} could not meet the others: {first_line(error)}"
        ) from error


def _never() -> bool:
    return False
