"""Number of CPU cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds of CPU time, or "max", in each period


def num_cores() -> int:
    """Return the number of CPU cores this process may use: affinity, limited by the container's quota."""
    num_allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(num_allowed, max(1, int(quota) // int(period)))  # int("max") raises ValueError
    except (OSError, ValueError):
        return num_allowed
