"""How a replica pool starts and reaches the processes of its replicas: implemented by spawn.py and ray_launcher.py."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lp_runtime.distributed.shards import ShardPlace


@dataclass(frozen=True)
class Placement:
    """Where a replica is; of one with several shards, where a shard is.

    Attributes:
        device_index: which of the GPUs that its process sees is the process's own.
        num_local: processes of replicas on its machine, itself included.
        owns_device: whether that GPU is booked for this replica, so that no other one shares the GPU's memory.
        shard: which shard of its replica the process is.
    """

    device_index: int
    num_local: int
    owns_device: bool = False
    shard: ShardPlace = ShardPlace()


@dataclass(frozen=True)
class Rendezvous:
    """Where the replicas of a group meet.

    Attributes:
        host: address of a store; unused with a segment.
        port: port of that store; unused with a segment.
        segment: name of the memory that they share; empty if they meet in the store.
    """

    host: str = ""
    port: int = 0
    segment: str = ""


class ProcessHost(ABC):
    """The processes of all replicas of a pool, known by the replica's index. A replica of several shards is as many
    processes, of which only the host knows: shard 0 is spoken with, all are started together, and end together.

    Construction reserves what they need, or raises with everything cleaned up. `receive` is called by one thread only,
    all else by any thread.
    """

    @abstractmethod
    def start_process(self, index: int) -> None:
        """Start a replica's process; it says ModelLoaded, or Failed, in its time."""

    @abstractmethod
    def send(self, index: int, message: object) -> None:
        """Send a message to a replica; never waits. That the replica is dead shows in `receive`."""

    def pickled(self, value: object) -> bytes:
        """Return a value of the caller's as bytes that `pickle.loads` reads in a replica, if the value's class can be
        imported there."""
        return pickle.dumps(value)

    @abstractmethod
    def receive(self, timeout: float) -> list[tuple[int, object]]:
        """Wait up to `timeout` seconds for a first message, and return (index, message) of all that have arrived. A
        process that has ended says Failed, once."""

    @abstractmethod
    def kill(self, index: int) -> Callable[[], None]:
        """End a replica's process, whatever it is doing; no message of it is received any more. Never waits.

        Returns:
            a function that waits until the process has ended and its memory is free: seconds, where it had a GPU.
        """

    @abstractmethod
    def rendezvous(self, members: Sequence[int]) -> Rendezvous | None:
        """Return where a group of several replicas meets; None if its rank 0, the first one, cannot be reached.

        Raises:
            LaunchError: if they cannot meet as launcher.backend asks.
        """

    @abstractmethod
    def placement(self, index: int) -> Placement:
        """Return where a replica is."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and free what was reserved; nobody receives any more."""
