"""How many tokens a replica's KV cache can hold in the memory that is free."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from lp_runtime.model.runner import ModelRunner

USABLE_FRACTION = 0.9  # of the free memory; activations need the rest
STEP_TOKENS = 1024  # that a step may write behind the committed ones: the largest step that calibration measures
NCCL_BYTES = 512 << 20  # of a communicator's buffers on each GPU, as NCCL allocates for 8 GPUs by default, rounded up
BYTES_PER_INTEGER = 8
MAX_WIDTH = 8  # integers that travel for a node, rounded up
NO_POOL = (0, 0)  # id of the pool that everybody allocates from
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory, in bytes, of a GPU, or for a CPU of this machine or container; None if it is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, free + idle - _idle_bytes_of_graphs(device))
    return min((each for each in (_free_of_machine(), _free_of_container()) if each is not None), default=None)


def _idle_bytes_of_graphs(device: torch.device) -> int:
    """Return the bytes that the pools of captured graphs hold and that no tensor has: only replays use them.

    Among them are the workspaces that libraries keep for the stream of the captures.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != NO_POOL
    )


def exchange_bytes(num_replicas: int, may_use_nccl: bool) -> int:
    """Return the bytes of a GPU that exchanging with other replicas will take, once a group is formed.

    Args:
        num_replicas: replicas of the runtime.
        may_use_nccl: whether they may exchange over NCCL.
    """
    if num_replicas == 1:
        return 0
    row = BYTES_PER_INTEGER * (STEP_TOKENS * MAX_WIDTH + STEP_TOKENS)
    return (num_replicas + 1) * row + (NCCL_BYTES if may_use_nccl else 0)


def _free_of_machine() -> int | None:
    """Return the bytes that this machine has available; None if it does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
        available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None
    return min(available, default=None)


def _free_of_container() -> int | None:
    """Return the bytes that this container's limit leaves; None without a limit."""
    try:  # "max" where there is no limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # files that were read, as a checkpoint, count as used until the memory is wanted
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - used + sum(int(stat.get(name, 0)) for name in RECLAIMABLE))
    except (OSError, ValueError):
        return None


def num_sharing(device: torch.device, num_local: int, owns_device: bool) -> int:
    """Return how many replicas share a device's memory.

    Args:
        device: of one of them.
        num_local: replicas on this machine, which divide its GPUs, or its main memory, among them.
        owns_device: whether a GPU is booked for the one alone. It may see no other GPU of the machine then.
    """
    if device.type == "cpu":
        return num_local
    return 1 if owns_device else -(-num_local // torch.cuda.device_count())


def capacity_in_tokens(model: ModelRunner, num_replicas: int, exchange_bytes: int = 0) -> int | None:
    """Return how many tokens of prompt and output together fit into a replica's free memory.

    Args:
        model: has fed something, so that the size of its cache's layers is known.
        num_replicas: replicas that share the device's memory.
        exchange_bytes: memory that the replica will need on its device to exchange with others.

    Returns:
        Tokens, >= 0; None if the capacity is unknown, as where a model lies on several devices.
    """
    if len({each.device for each in model.model.parameters()}) > 1:
        return None
    free, token_bytes = free_bytes(model.device), model.cache_bytes_per_token
    if free is None or not token_bytes:
        return None
    return tokens_in(max(0, free // num_replicas - exchange_bytes), token_bytes)


def tokens_in(num_bytes: int, token_bytes: int) -> int:
    """Return how many tokens of prompt and output together fit into free memory.

    Args:
        num_bytes: that are free beside the weights.
        token_bytes: of a token's keys and values.
    """
    return max(0, int(num_bytes * USABLE_FRACTION) // token_bytes - STEP_TOKENS)


def bytes_of_tokens(num_tokens: int, token_bytes: int) -> int:
    """Return the least free memory, in bytes, into which tokens fit, as `tokens_in` has it."""
    return math.ceil((num_tokens + STEP_TOKENS) * token_bytes / USABLE_FRACTION)
