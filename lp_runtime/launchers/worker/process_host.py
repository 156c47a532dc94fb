"""Interface that starts replica processes and carries messages: see spawn.py and ray_launcher.py."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.shards import ShardPlace


@dataclass(frozen=True)
class Placement:
    """Location of a process: its GPU, the number of processes on its machine, and its shard."""

    device_index: int  # of its GPU (the first, if it has several) among those that the process sees
    num_local: int  # replica processes on its machine, this one included
    owns_device: bool = False  # the GPU is reserved for this replica, so that no other one shares its memory
    shard: ShardPlace = ShardPlace()


class ProcessHost(ABC):
    """The processes of all replicas of a pool, addressed by the replica's index.

    A replica of several shards has one process per shard, which only the host knows: all are started and killed
    together, and orders go to shard 0. The constructor reserves resources, or raises with everything cleaned up.
    `receive` is called by one thread only; the other methods by any thread.
    """

    num_shards: int  # of each replica

    def numbers(self, index: int) -> range:
        """Return the numbers of a replica's processes, consecutive over all replicas; the first is shard 0's."""
        return range(index * self.num_shards, (index + 1) * self.num_shards)

    @abstractmethod
    def start_process(self, index: int) -> None:
        """Start a replica's process without waiting for it; it will send ModelLoaded or Failed."""

    @abstractmethod
    def send(self, index: int, message: object) -> None:
        """Send a message to a replica; never waits. If the replica is dead, `receive` reports it."""

    def pickled(self, value: object) -> bytes:
        """Pickle a logits processor for `pickle.loads` in a replica, where its class must be importable."""
        return pickle.dumps(value)

    @abstractmethod
    def receive(self, timeout: float) -> list[tuple[int, object]]:
        """Return (index, message) of all messages that have arrived.

        Waits up to `timeout` seconds for the first. A process that has ended without `kill` yields one Failed.
        """

    @abstractmethod
    def kill(self, index: int) -> Callable[[], None]:
        """Kill a replica's process without waiting; `receive` returns none of its messages any more.

        Returns a function that waits until the process has ended and its memory is free, which takes seconds on a GPU.
        """

    @abstractmethod
    def rendezvous(self, members: Sequence[int]) -> ReplicaContext | None:
        """Return a context with the meeting point (host and port, or segment) of a group of several replicas.

        `members` are their indices by rank. None if rank 0 is unreachable.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all processes and release all resources; called when no thread is in `receive` any more."""
