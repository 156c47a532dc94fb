"""Chooses between GPUs and CPUs, and diagnoses why torch sees no GPU on a machine that has one."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch

from lp_runtime.distributed.environment import NO_GPUS, visible_gpus
from lp_runtime.errors import ConfigError
from lp_runtime.utils.limits import num_cores

log = logging.getLogger(__name__)

DRIVER_VERSION = Path("/proc/driver/nvidia/version")  # also visible in containers without access to the GPUs
DRIVER_CONTROL = Path("/dev/nvidiactl")  # only visible with access to the GPUs
CORES_PER_REPLICA = 2  # to poll for the end of a pass: one polls, one is for the process's other threads
MIN_DRIVERS = {12: 525, 13: 580}  # minimum driver major version, by CUDA major version
WHEELS = "https://download.pytorch.org/whl"


def device_type(device: str) -> str:
    """Return "cuda" or "cpu" for a `device` setting.

    With "auto", a container without access to the machine's GPUs logs a warning and uses CPUs. Raises ConfigError if
    the machine has an NVIDIA GPU that torch cannot use, and the setting is not "cpu".
    """
    if device == "cpu":
        return device
    if reason := why_no_gpu():
        if device == "cuda" or DRIVER_CONTROL.exists():
            raise ConfigError(f"device={device}: {reason} (on CPUs: device=cpu)")
        log.warning("device=auto: %s; going on with CPUs", reason)
    return "cuda" if device == "cuda" or torch.cuda.is_available() else "cpu"


def why_no_gpu() -> str | None:
    """Return why torch sees no GPU on a machine that has one, and the remedy; None if there is no problem."""
    visible = visible_gpus()
    if torch.cuda.is_available() or (visible is not None and visible[0] in NO_GPUS):
        return None
    has_control = DRIVER_CONTROL.exists()
    if torch.version.cuda is None:  # normal in a container without access to the GPUs
        built = f"torch {torch.__version__} is built without CUDA, and this machine has an NVIDIA GPU"
        return f"{built}: install a CUDA build of torch from {WHEELS}" if has_control else None
    driver = _driver_version()
    if driver is None and not has_control:
        return None
    return _why_too_old(driver) or _why_unseen(driver, has_control, visible)


def _why_too_old(driver: str | None) -> str | None:
    """Return a message if torch needs a newer driver; None if it does not, or a version is unknown."""
    cuda = str(torch.version.cuda)
    needed = MIN_DRIVERS.get(int(cuda.split(".")[0]))
    if driver is None or needed is None or int(driver.split(".")[0]) >= needed:
        return None
    return (
        f"the NVIDIA driver is {driver}, and torch's CUDA {cuda} needs {needed} or newer: update the driver, or install"
        f" a torch built for an older CUDA from {WHEELS}"
    )


def _why_unseen(driver: str | None, has_control: bool, visible: list[str] | None) -> str:
    reason = f"torch sees no GPU, although the NVIDIA driver {f'{driver} ' if driver else ''}is loaded"
    if not has_control:
        return f"{reason}: {DRIVER_CONTROL} is missing; start the container with its GPUs (docker run --gpus all)"
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={','.join(visible)})"
    return f"{reason}{hidden}: run nvidia-smi to see why"


def _driver_version() -> str | None:
    try:
        match = re.search(r"\s(\d+\.\d[\d.]*)\s", DRIVER_VERSION.read_text())
    except OSError:
        return None
    return match[1] if match else None


def gpu_number(device: torch.device) -> int:
    """Return a 63-bit number that identifies a GPU across machines."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).int >> 65


def check_one_each(numbers: Sequence[int]) -> None:
    """Raise ConfigError if two replicas have the same `gpu_number`; 0: a GPU that may be shared, or none."""
    for rank, number in enumerate(numbers):
        if number and (first := list(numbers).index(number)) < rank:
            raise ConfigError(
                f"replicas {first} and {rank} have the same GPU, and each sees one alone: give each process its own"
                " (srun --gpus-per-task=1), or let them share it with launcher.backend=shared"
            )


def must_sleep(num_local: int, owns_device: bool) -> bool:
    """Whether a process should sleep while it waits for its GPU, because there are too few cores to poll."""
    is_pinned = owns_device and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)  # to its own cores, as by srun
    # Waking up takes an estimated 20 to 50 us.
    return num_cores() < CORES_PER_REPLICA * (1 if is_pinned else num_local)


def warn_of_few_cores(num_local: int) -> None:
    """Warn if this process may use fewer CPU cores than there are GPU processes on this machine."""
    cores = num_cores()
    if cores < num_local:  # a replica that waits for a core delays every replica's step
        log.warning(
            "%d cores for %d processes that each keep one busy: steps will be slow; allow %d or more (4 for each GPU)",
            cores,
            num_local,
            num_local,
        )
