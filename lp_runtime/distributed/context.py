"""Who a process is among the replicas, as torchrun tells it. Imports nothing that takes time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lp_runtime.errors import LaunchError


@dataclass(frozen=True)
class ReplicaContext:
    """Who a replica is among its peers.

    Attributes:
        rank: 0 <= rank < num_replicas.
        num_replicas: the LP degree at start.
        device_index: which of the GPUs that this process sees is the replica's; unused on CPUs.
        num_local: replicas on this machine.
        host, port: where the store listens in which the replicas meet; unused for one replica.
        hosts_store: whether this process must open that store.
        owns_process: whether the process is there for this replica alone, which then sets its thread count.
        attempt: which start of the same group this is; torchrun starts it again when a rank fails.
    """

    rank: int = 0
    num_replicas: int = 1
    device_index: int = 0
    num_local: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = False
    owns_process: bool = True
    attempt: int = 0

    @classmethod
    def from_torchrun(cls) -> ReplicaContext:
        """Read torchrun's variables; the only place that does.

        Raises:
            LaunchError: if this process was not started by torchrun.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise LaunchError(
                f"launcher=torchrun: {missing[0]} is not set; start with"
                " 'torchrun --nproc-per-node GPUS -m lp_runtime ...', or choose launcher=local or launcher=ray"
            )
        rank, size, local, num_local, port = (int(os.environ[name]) for name in (*names[:4], names[5]))
        return cls(
            rank,
            size,
            local,
            num_local,
            os.environ["MASTER_ADDR"],
            port,
            # torchrun's agent hosts the store, unless told not to; other programs that set these variables do not
            hosts_store=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


def started_by_torchrun() -> bool:
    """Whether torchrun (or another elastic agent) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted_by_torchrun() -> bool:
    """Whether torchrun's agent has started this process after a rank had failed; there may be fewer of them now."""
    return started_by_torchrun() and ReplicaContext.from_torchrun().attempt > 0
