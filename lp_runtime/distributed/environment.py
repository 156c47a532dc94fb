"""The environment variables that this package reads and sets. No other module touches them. Fast to import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lp_runtime.errors import ConfigError, LaunchError

NO_GPUS = ("", "-1", "NoDevFiles")  # first entries of CUDA_VISIBLE_DEVICES that hide all GPUs; Slurm sets the last one
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
MAX_NUMBER = 10**6  # of processes or restarts; far more than there are
MAX_PORT = 65535
# Settings of torch's GPU allocator. The last two are older names, which torch still reads.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class ReplicaContext:
    """A process's replica, and the meeting point of its group."""

    rank: int = 0  # 0 <= rank < num_replicas
    num_replicas: int = 1  # LP degree at start
    device_index: int = 0  # of the replica's GPU among those that the process sees; unused on CPUs
    num_local: int = 1  # replicas on this machine
    host: str = "127.0.0.1"  # of the store in which the replicas meet; unused for one replica
    port: int = 0
    hosts_store: bool = False  # whether this process must open that store
    owns_process: bool = True  # the process runs only this replica, which then sets the process's thread count
    segment: str = ""  # name of the shared memory over which the replicas exchange; empty if they meet in the store
    owns_device: bool = False  # the process sees a single GPU, at index 0, that no other replica may use
    attempt: int = 0  # earlier starts of the replicas: torchrun restarts all of them when a rank fails

    @classmethod
    def from_torchrun(cls) -> ReplicaContext:
        """Read the context from torchrun's environment variables. This is the only code that reads them."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            raise LaunchError(
                f"launcher=torchrun: {missing[0]} is not set; start with"
                " 'torchrun --nproc-per-node GPUS -m lp_runtime ...', or choose launcher=local or launcher=ray"
            )
        size = _number("WORLD_SIZE", 1, MAX_NUMBER)
        rank = _number("RANK", 0, size - 1)
        num_local = _number("LOCAL_WORLD_SIZE", 1, size)
        local = _number("LOCAL_RANK", 0, num_local - 1)
        visible = visible_gpus()
        # `srun --gpus-per-task=1` shows each process its own GPU, at index 0.
        owns_device = num_local > 1 and visible is not None and len(visible) == 1 and visible[0] not in NO_GPUS
        return cls(
            rank,
            size,
            0 if owns_device else local,
            num_local,
            os.environ["MASTER_ADDR"],
            _number("MASTER_PORT", 1, MAX_PORT),
            # torchrun's agent usually hosts the store; other programs that set the same variables do not
            owns_device=owns_device,
            hosts_store=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=_number(RESTARTS, 0, MAX_NUMBER) if RESTARTS in os.environ else 0,
        )

    def divided(self, num_shards: int) -> tuple[ReplicaContext, int]:
        """Return the replica's context and this process's shard; consecutive ranks are a replica's shards."""
        for number, where in ((self.num_replicas, ""), (self.num_local, " on this machine")):
            if number % num_shards:
                raise ConfigError(
                    f"gpus_per_replica={num_shards}: torchrun has started {number} processes{where}; must be a multiple"
                )
        replica, shard = divmod(self.rank, num_shards)
        return replace(self, rank=replica, num_replicas=self.num_replicas // num_shards), shard


def _number(name: str, lowest: int, highest: int) -> int:
    """Return the number that one of torchrun's variables has, within these bounds."""
    text = os.environ[name]
    if not (text.isdecimal() and len(text) <= len(str(MAX_NUMBER)) and lowest <= int(text) <= highest):
        raise LaunchError(f"launcher=torchrun: {name}={text}: must be a number from {lowest} to {highest}")
    return int(text)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that a library reads, for the duration of a `with` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def visible_gpus() -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES; None if it is not set, so that all GPUs are visible."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",")]


def keep_caches_in(folder: str | None) -> None:
    """Cache compiled Numba and Triton code of this process and its children in a folder.

    Variables that are set already (NUMBA_CACHE_DIR, TRITON_CACHE_DIR) take precedence.
    """
    expanded = os.path.expanduser(folder or "~")
    if folder is None or expanded.startswith("~"):  # this user has no home folder
        return
    for library in ("numba", "triton"):
        os.environ.setdefault(f"{library.upper()}_CACHE_DIR", os.path.join(expanded, library))


def use_expandable_segments() -> None:
    """Set torch's GPU allocator to expandable segments, unless the user configures it.

    Call it before CUDA starts. Slots and cached prefixes are tensors of many sizes. Without expandable segments, a
    block that was split is of no use to larger tensors until all of its parts are free.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted_by_torchrun() -> bool:
    """Whether torchrun restarted this process after a rank failed. There may be fewer ranks now."""
    return started_by_torchrun() and ReplicaContext.from_torchrun().attempt > 0


def ray_address() -> str | None:
    """Return the address of the Ray cluster that the environment names, as Ray reads it; None without one."""
    return os.environ.get("RAY_ADDRESS") or None
