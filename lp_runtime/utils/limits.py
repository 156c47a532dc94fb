"""Limits of this process: CPU cores, and control groups, with which containers, systemd and Slurm limit processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MORE_PROCESSES = "raise the limit of processes and threads (ulimit -u, or pids.max of the container)"  # a remedy
ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")  # a line "ID:CONTROLLERS:PATH" for each hierarchy; version 2's is "0::PATH"

# Microseconds of CPU time in each period, and the period. Without a limit, the time is "max" or -1.
QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def num_cores() -> int:
    """Return the number of CPU cores this process may use: affinity, limited by the quotas of its control groups."""
    limits = [len(os.sched_getaffinity(0))]
    for _, (quota, period) in read_limits("cpu", *QUOTA_FILES):
        if quota.isdigit():
            limits.append(max(1, int(quota) // int(period)))
    return min(limits)


def read_limits(controller: str, *names: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the limits that apply to this process, of its group and of all groups around it: (folder, two words).

    Args:
        controller: "cpu" or "memory".
        names: the files that have the two words, in version 2 and in version 1. A group without them has no limit.
    """
    for folder in _folders(controller):
        for files in names:
            with contextlib.suppress(OSError, ValueError):
                first, second = " ".join((folder / name).read_text() for name in files).split()
                yield folder, (first, second)


def _folders(controller: str) -> Iterator[Path]:
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounts = [ROOT, ROOT / "unified"] if not controllers else [ROOT / controller]
        if controllers and controller not in controllers.split(","):
            continue
        for mount in mounts:
            # In a container, the path may be that on the host, where only the mount itself exists.
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))
