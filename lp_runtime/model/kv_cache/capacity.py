"""How many tokens a replica's cache has room for in the memory that is free."""

from __future__ import annotations

from pathlib import Path

import torch

from lp_runtime.model.runner import ModelRunner

USABLE = 0.9  # of what is free; activations need some
ONE_STEP = 1024  # tokens of a step, which need room, too
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device, or of this machine or container; None if it cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = []
    try:
        lines = MEMINFO.read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    try:  # "max" where there is no limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # files that were read, as a checkpoint, count as used until the memory is wanted
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        found.append(max(0, limit - used + sum(int(stat.get(name, 0)) for name in RECLAIMABLE)))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def capacity_in_tokens(model: ModelRunner, num_sharing: int) -> int | None:
    """How many tokens of prompt and output together a replica has room for; None if it cannot be told, as where a model
    lies on several devices.

    Args:
        model: has fed something, so that its cache's layers are known.
        num_sharing: replicas that share the device's memory.
    """
    if len({each.device for each in model.model.parameters()}) > 1:
        return None
    free, each = free_bytes(model.device), model.cache_bytes_per_token
    if free is None or not each:
        return None
    return max(0, int(free // num_sharing * USABLE) // each - ONE_STEP)
