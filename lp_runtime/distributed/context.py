"""Which replica a process is, and where the replicas meet. Imports nothing that takes long to import."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from lp_runtime.errors import ConfigError, LaunchError

NO_GPUS = ("", "-1", "NoDevFiles")  # first names in CUDA_VISIBLE_DEVICES that hide all GPUs; the last one is Slurm's


@dataclass(frozen=True)
class ReplicaContext:
    """Which replica a process is, and where the replicas meet.

    Attributes:
        rank: The replica's place, 0 <= rank < num_replicas.
        num_replicas: LP degree at start.
        device_index: Index of the replica's GPU among those that the process sees; unused on CPUs.
        num_local: Number of replicas on this machine.
        host: Address of the store in which the replicas meet; unused for one replica.
        port: Port of that store; unused for one replica.
        hosts_store: Whether this process must open that store.
        owns_process: Whether the process serves this replica alone; the replica then sets the process's thread count.
        segment: Name of the shared memory in which the replicas exchange; empty if they meet in the store.
        owns_device: Whether the process sees one GPU alone, which is then at index 0 and no other replica's.
        attempt: Number of times that the replicas were started before; torchrun starts all of them when a rank fails.
    """

    rank: int = 0
    num_replicas: int = 1
    device_index: int = 0
    num_local: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = False
    owns_process: bool = True
    segment: str = ""
    owns_device: bool = False
    attempt: int = 0

    @classmethod
    def from_torchrun(cls) -> ReplicaContext:
        """Return the context that torchrun's environment variables give; no other code reads them.

        Raises:
            LaunchError: If torchrun did not start this process.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise LaunchError(
                f"launcher=torchrun: {missing[0]} is not set; start with"
                " 'torchrun --nproc-per-node GPUS -m lp_runtime ...', or choose launcher=local or launcher=ray"
            )
        numbers = []
        for name in (*names[:4], names[5]):
            if not os.environ[name].isdecimal():
                raise LaunchError(f"launcher=torchrun: {name}={os.environ[name]}: must be a number")
            numbers.append(int(os.environ[name]))
        rank, size, local, num_local, port = numbers
        visible = visible_gpus()
        # `srun --gpus-per-task=1` shows each process its own GPU, at index 0.
        owns_device = num_local > 1 and visible is not None and len(visible) == 1 and visible[0] not in NO_GPUS
        return cls(
            rank,
            size,
            0 if owns_device else local,
            num_local,
            os.environ["MASTER_ADDR"],
            port,
            # torchrun's agent hosts the store, unless told not to; other programs that set these variables do not
            owns_device=owns_device,
            hosts_store=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def divided(self, num_shards: int) -> tuple[ReplicaContext, int]:
        """Return the context of the replica that a process of torchrun belongs to, where ranks in a row are the shards
        of one replica, and which of its shards the process is.

        Args:
            num_shards: shards of each replica.

        Raises:
            ConfigError: If the processes, or those of this machine, do not make whole replicas.
        """
        for number, where in ((self.num_replicas, ""), (self.num_local, " on this machine")):
            if number % num_shards:
                raise ConfigError(
                    f"gpus_per_replica={num_shards}: torchrun has started {number} processes{where}; must be a multiple"
                )
        replica, shard = divmod(self.rank, num_shards)
        return replace(self, rank=replica, num_replicas=self.num_replicas // num_shards), shard


def visible_gpus() -> list[str] | None:
    """Return the names of the GPUs that CUDA_VISIBLE_DEVICES shows to this process, in the order of their indices; None
    if it is not set, so that the process sees all GPUs."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",")]


def keep_caches_in(folder: str | None) -> None:
    """Keep the compiled code of this process and its children below a folder; the environment may name another."""
    if folder is None:
        return
    for library in ("numba", "triton"):
        os.environ.setdefault(f"{library.upper()}_CACHE_DIR", os.path.join(os.path.expanduser(folder), library))


def started_by_torchrun() -> bool:
    """Return whether torchrun (or another elastic agent) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted_by_torchrun() -> bool:
    """Return whether torchrun's agent started this process after a rank had failed; there may be fewer ranks now."""
    return started_by_torchrun() and ReplicaContext.from_torchrun().attempt > 0
