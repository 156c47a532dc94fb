"""Control channel between a replica's shards: shard 0 announces each forward pass.

A replica that spans P GPUs consists of P processes on one machine, its shards. Only shard 0 decodes. It announces every
forward pass; all shards run it on their slices of the model and combine their results during the pass (reducers.py).
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

from lp_runtime.distributed.devices import gpu_number
from lp_runtime.distributed.environment import ReplicaContext, environment
from lp_runtime.distributed.process_group import new_segment_name
from lp_runtime.distributed.reducers import CollectiveReducer, HostReducer, Reducer, SharedMemoryReducer, peers
from lp_runtime.distributed.store import cannot_join, connect, wait_for_all
from lp_runtime.distributed.transport.shared_memory import FOLDER, SharedMemoryTransport
from lp_runtime.errors import LaunchError, PassFailedError, ShardError, first_line
from lp_runtime.utils.callables import never

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store
else:
    from torch.distributed import FileStore, PrefixStore, Store

log = logging.getLogger(__name__)

STORES = ("-load", "-sums", "-peers")  # suffixes of a segment's name: the files of the stores in which shards meet
BUFFER_WORDS = 1 << 16  # 512 KiB per shard, so that most all-reduces of a step take one round


@dataclass(frozen=True)
class ShardPlace:
    """A process's shard index in its replica, and the meeting point of the shards."""

    shard: int = 0  # 0 <= shard < num_shards; shard 0 decodes
    num_shards: int = 1  # P
    segment: str = ""  # unique name of the memory that the replica's shards share; unused for one shard
    step_timeout: float = 60.0  # seconds after which a shard that does not answer is an error

    @property
    def is_whole(self) -> bool:
        return self.num_shards == 1

    @property
    def is_leader(self) -> bool:
        return self.shard == 0


class ShardLink:
    """Connection between the shards of a replica. The constructor waits until all of them have joined.

    GPUs reduce over NCCL; CPUs, and shards that share a GPU, over shared memory. Raises LaunchError if the shards do
    not meet within `timeout` seconds, and ShardError if one is gone before all have exchanged their GPUs' identities.
    """

    def __init__(self, place: ShardPlace, device: torch.device, timeout: float):
        self.place = place
        self._transport = SharedMemoryTransport(
            place.segment, place.shard, place.num_shards, timeout, place.step_timeout, never, BUFFER_WORDS
        )
        # For the all-reduces inside forward passes; may be replaced before the first pass.
        self.reducer: Reducer = SharedMemoryReducer(self._transport, place.num_shards)
        if device.type == "cuda":
            self.reducer = self._device_reducer(device, timeout)

    def _device_reducer(self, device: torch.device, timeout: float) -> Reducer:
        """Return the reducer for GPUs: NCCL, or the host if two shards share a GPU (NCCL refuses that)."""
        mine = torch.tensor([gpu_number(device)])
        gathered = torch.empty(self.place.num_shards, dtype=torch.int64)
        with peers():
            self._transport.all_gather(gathered, mine)
        if len(gathered.unique()) < len(gathered):
            return HostReducer(self.reducer)
        group = shard_group(self.place, "nccl", timeout)
        return CollectiveReducer(group, self.place.num_shards, can_capture=True)

    def announce(self, message: object) -> None:
        """Send the next operation to the other shards; called by shard 0."""
        with peers():
            self._transport.broadcast(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), is_patient=False)

    def listen(self) -> object:
        """Return shard 0's next announcement; waits without limit."""
        with peers():
            return pickle.loads(self._transport.broadcast(None, is_patient=True))

    def smallest(self, number: int) -> int:
        with peers():
            gathered = torch.empty(self.place.num_shards, dtype=torch.int64)
            self._transport.all_gather(gathered, torch.tensor([number]))
            return int(gathered.min())

    def end_pass(self) -> None:
        """Wait until every shard ends the pass on its host; PassFailedError if it has failed on another shard."""
        try:
            self.smallest(self.reducer.num_calls)
        except PassFailedError as error:
            self._check_matched(error.num_calls)
            raise

    def fail_pass(self) -> None:
        """Give up a pass that failed here: the others' calls, `end_pass` at the latest, raise PassFailedError."""
        with peers():
            num_calls = self._transport.fail(self.reducer.num_calls)
        self._check_matched(num_calls)

    def _check_matched(self, num_calls: list[int]) -> None:
        """Raise ShardError if a GPU waits for another shard's call that will not come."""
        if self.reducer.can_capture and len(set(num_calls)) > 1:
            raise ShardError(f"a pass has failed on some GPUs of the replica, after {num_calls} sums")

    def peer_buffer(self, size: int, dtype: torch.dtype, device: torch.device, timeout: float) -> torch.Tensor | None:
        """Allocate memory that all shards' GPUs can read (torch's symmetric memory). All shards must call it.

        Returns [size] this shard's part, whose group has the segment's name. None on all shards if any of them cannot
        allocate it: the GPUs do not reach each other, or this version of torch lacks symmetric memory.
        """
        buffer, place = None, self.place
        with _store(place, STORES[2], timeout) as store:
            try:
                buffer = _symmetric_memory(place, store, size, dtype, device)
            except Exception as error:  # torch raises many types if two GPUs cannot reach each other
                log.info("the GPUs of a replica have no symmetric memory: %s", first_line(error))
            has_all = self.smallest(buffer is not None)  # also keeps the store open until every shard is done with it
        return buffer if has_all else None

    def close(self) -> None:
        """Leave the connection; later calls of the other shards raise ShardError."""
        self._transport.close()


def meet_in_store(
    context: ReplicaContext, shard: int, num_shards: int, timeout: float, step_timeout: float
) -> ShardPlace:
    """Agree on a meeting point with the other shards of a replica, through torchrun's store."""
    segment = said_by_first(context, f"shards/{context.rank}", new_segment_name, timeout, shard, num_shards)
    return ShardPlace(shard, num_shards, segment, step_timeout)


def said_by_first(
    context: ReplicaContext, name: str, value: Callable[[], str], timeout: float, rank: int, num_ranks: int
) -> str:
    """Broadcast a string from rank 0 of `num_ranks` to the others, through torchrun's store.

    `value` computes the string, and is called on rank 0 only; `name` is its key in the store. Raises LaunchError if,
    within `timeout` seconds, rank 0 has not computed the string or, on rank 0, not all ranks have read it.
    """
    try:
        store = connect(context, timeout)
        key = f"lp_runtime/{name}/{context.attempt}"
        # Numbered, since a script may start one runtime after another, in the same order on all ranks.
        key = f"{key}/{(store.add(f'{key}/came', 1) - 1) // num_ranks}"
        if rank == 0:
            store.set(key, value())
        stored = store.get(key).decode()
        store.add(f"{key}/read", 1)
        if rank == 0:  # it may host the store, which ends with its process
            wait_for_all(store, f"{key}/read", num_ranks, timeout, never)
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error
    return stored


def shard_group(place: ShardPlace, backend: str, timeout: float) -> dist.ProcessGroup:
    """Form a "nccl" or "gloo" group of a replica's shards, independent of the default process group."""
    # NCCL's monitor would read the store, which is gone once the group has formed, and keep a shard from exiting.
    unwatched = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with _store(place, STORES[1], timeout) as store, environment(unwatched), _meeting(place):
        group: dist.ProcessGroup
        if backend == "nccl":
            group = dist.ProcessGroupNCCL(store, place.shard, place.num_shards, dist.ProcessGroupNCCL.Options())  # type: ignore[assignment]
        else:
            group = dist.ProcessGroupGloo(store, place.shard, place.num_shards, timedelta(seconds=timeout))  # type: ignore[assignment]
        group.allreduce([torch.zeros(1, device="cuda" if backend == "nccl" else "cpu")]).wait()  # all have joined
    return group


def _symmetric_memory(
    place: ShardPlace, store: Store, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    # The public API requires a subgroup of the default group. This registers a separate group by name.
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
    """Make a replica's shards the default process group in a `with` block."""
    # transformers slices a model by the default group's mesh, and reads a rank's GPU from LOCAL_RANK. Loopback: all
    # shards are on this machine, and its host name may not resolve.
    variables = {"LOCAL_RANK": str(device.index or 0), "GLOO_SOCKET_IFNAME": "lo"}
    with _store(place, STORES[0], timeout) as store, environment(variables):
        with _meeting(place):  # over gloo: only small objects are sent in this group
            dist.init_process_group(
                "gloo", store=store, rank=place.shard, world_size=place.num_shards, timeout=timedelta(seconds=timeout)
            )
        try:
            yield
            with _meeting(place):
                dist.barrier()  # keeps the store open until every shard is done with it
        finally:
            dist.destroy_process_group()


def clear_up(segment: str) -> None:
    """Remove the files of a segment (see ShardPlace) whose shards were killed while they were joining."""
    for name in ("", *STORES):
        with contextlib.suppress(OSError):  # missing (the normal case), or a read-only file system
            (FOLDER / f"{segment}{name}").unlink()


@contextmanager
def _store(place: ShardPlace, name: str, timeout: float) -> Iterator[Store]:
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
    """Convert torch's errors to LaunchError while the shards of a replica meet."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"shard {place.shard} of {place.num_shards} could not meet the others: {first_line(error)}"
        ) from error
