"""KV-cache capacity, in tokens, of the memory that is free."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from lp_runtime.model.kv_cache.slots import OVERHEAD_TOKENS, STEP_TOKENS
from lp_runtime.model.runner import ModelRunner
from lp_runtime.utils.limits import read_limits

USABLE_FRACTION = 0.9  # of the free memory if passes are not measured; they need the rest
MEASURED_FRACTION = 0.97  # of the free memory if they are; the rest is for a slot that grows, and for libraries
NCCL_BYTES = 512 << 20  # a communicator's buffers on each GPU: NCCL's default for 8 GPUs, rounded up
BYTES_PER_INTEGER = 8
MAX_WIDTH = 8  # integers exchanged per node, rounded up
NO_POOL = (0, 0)  # id of torch's default memory pool
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")  # memory.stat entries the kernel frees on demand
LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
NO_LIMIT = 1 << 60  # version 1 of control groups has a larger number where there is none
MEMINFO = Path("/proc/meminfo")


class PassBytes(NamedTuple):
    """Measured bytes of GPU memory for a pass and its sampling, in addition to weights, keys and values."""

    fixed: int
    per_token: float  # for each token of the text that the pass attends to


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU or, for a CPU, of this machine or container; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's cache: usable
        return max(0, free + idle - _idle_bytes_of_graphs(device))
    return min((each for each in (_free_of_machine(), _free_of_container()) if each is not None), default=None)


def _idle_bytes_of_graphs(device: torch.device) -> int:
    """Return the bytes, in the memory pools of captured graphs, that only replays and libraries use."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != NO_POOL
    )


def exchange_bytes(num_replicas: int, may_use_nccl: bool) -> int:
    """Return the GPU memory, in bytes, that exchanging with other replicas needs once a group is formed."""
    if num_replicas == 1:
        return 0
    row = BYTES_PER_INTEGER * (STEP_TOKENS * MAX_WIDTH + STEP_TOKENS)
    return (num_replicas + 1) * row + (NCCL_BYTES if may_use_nccl else 0)


def _free_of_machine() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
        available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None
    return min(available, default=None)


def _free_of_container() -> int | None:
    """Return the bytes left below the memory limits of this process's control groups; None without a limit."""
    left = []
    for folder, (limit, used) in read_limits("memory", *LIMIT_FILES):
        if limit == "max" or int(limit) >= NO_LIMIT:
            continue
        try:
            # cached files, such as a checkpoint just read, count as used until the kernel needs the memory
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            stat = {}
        # version 1 has sums over the groups inside with this prefix
        cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in RECLAIMABLE)
        left.append(max(0, int(limit) - int(used) + cached))
    return min(left, default=None)


def num_sharing(device: torch.device, num_local: int, owns_device: bool) -> int:
    """Return how many replicas share a device's memory.

    The `num_local` replicas of a machine divide its GPUs, or its main memory, among them. A replica that `owns_device`
    is alone on its GPU, and may see no other GPU of the machine.
    """
    if device.type == "cpu":
        return num_local
    return 1 if owns_device else -(-num_local // torch.cuda.device_count())


def capacity_in_tokens(
    model: ModelRunner, num_replicas: int, exchange_bytes: int = 0, pass_bytes: PassBytes | None = None
) -> int | None:
    """Return how many tokens, prompt and output together, fit into a replica's free memory, if known.

    Unknown (None) if the model spans several devices, or has run no pass yet: only then is the size of a token in its
    cache known. `num_replicas` share the device's memory, and `exchange_bytes` are left free for exchanges.
    """
    if len({each.device for each in model.model.parameters()}) > 1:
        return None
    free, token_bytes = free_bytes(model.device), model.cache_bytes_per_token
    if free is None or not token_bytes:
        return None
    usable = max(0, free // num_replicas - exchange_bytes)
    if pass_bytes is None:
        return tokens_in(usable, token_bytes)
    usable = int(usable * MEASURED_FRACTION) - pass_bytes.fixed
    num_tokens = int(usable / (token_bytes + pass_bytes.per_token))  # if one text has all of them
    if model.context_length is not None:
        num_tokens = max(num_tokens, int((usable - pass_bytes.per_token * model.context_length) / token_bytes))
    return max(0, num_tokens - OVERHEAD_TOKENS)


def tokens_in(num_bytes: int, token_bytes: int) -> int:
    """Return how many tokens (prompt and output) fit into `num_bytes`, which the weights leave free."""
    return max(0, int(num_bytes * USABLE_FRACTION) // token_bytes - STEP_TOKENS)


def bytes_of_tokens(num_tokens: int, token_bytes: int) -> int:
    """Return the smallest free memory, in bytes, that holds this many tokens: the inverse of `tokens_in`."""
    return math.ceil((num_tokens + STEP_TOKENS) * token_bytes / USABLE_FRACTION)
