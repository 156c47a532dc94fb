"""Choice of devices that run the Triton kernels, each after a trial launch."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from lp_runtime.errors import first_line

log = logging.getLogger(__name__)

SIGMOID_OF_ONE = 0.7310586  # expected result of the trial launch
TOLERANCE = 1e-5  # of that result, in float32
MIN_CAPABILITY = (8, 0)  # compute capability: the kernels are sized for the registers and shared memory of these GPUs


def kernels_for(device: torch.device) -> ModuleType | None:
    """Return the module triton_gpu if its kernels work on a device; warn once if they should but do not."""
    return triton_gpu() if why_no_kernels(device) is None else None


@functools.cache
def triton_gpu() -> ModuleType | None:
    """Import triton_gpu, and Triton with it; return None if Triton is not installed.

    Only processes that use a GPU may call this: on a machine without one, Triton may print lines when the process ends.
    """
    try:
        from lp_runtime.kernels import triton_gpu as module
    except ImportError:
        return None
    return module


@functools.cache
def why_no_kernels(device: torch.device) -> str | None:
    """Try one kernel on a device; return why the Triton kernels cannot be used there, or None if they can."""
    if device.type != "cuda":
        return f"{device} is no GPU"
    kernels = triton_gpu()
    if kernels is None:
        return "Triton is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    try:  # the first launch compiles the kernel, which needs a C compiler and Python's headers
        with on(device):
            value = kernels.gate(torch.ones(1, 2, device=device)).item()
    except Exception as error:
        reason = f"Triton does not run on {device}: {first_line(error)}"
    else:
        if abs(value - SIGMOID_OF_ONE) < TOLERANCE:
            return None
        reason = f"Triton computes {value} instead of {SIGMOID_OF_ONE} on {device}"
    log.warning("%s; going on without its kernels", reason)
    return reason


def on(device: torch.device) -> AbstractContextManager:
    """Return a context that makes a GPU current: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
