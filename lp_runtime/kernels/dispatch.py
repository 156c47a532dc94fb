"""Where Triton's kernels can be used."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from lp_runtime.errors import first_line

log = logging.getLogger(__name__)

SIGMOID_OF_ONE = 0.7310586  # what the trial launch must compute
TOLERANCE = 1e-5  # of that, in float32
MIN_CAPABILITY = (8, 0)  # compute capability of GPUs whose registers and shared memory the kernels were made for


def kernels_for(device: torch.device) -> ModuleType | None:
    """Return the module triton_gpu where it can be used on a device, else None.

    A GPU that should run the kernels and does not is logged as a warning, once.
    """
    return triton_gpu() if device.type == "cuda" and _can_run(device) else None


@functools.cache
def triton_gpu() -> ModuleType | None:
    """Import the module of the kernels, and Triton with it; None where Triton is not installed.

    Only processes that use a GPU call this: on a machine without one, Triton may print lines when the process ends.
    """
    try:
        from lp_runtime.kernels import triton_gpu as module
    except ImportError:
        return None
    return module


@functools.cache
def _can_run(device: torch.device) -> bool:
    """Launch one kernel on a GPU and return whether its result is right."""
    kernels = triton_gpu()
    if kernels is None or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    try:  # a kernel is compiled when it is first launched, which takes a C compiler and Python's headers
        with on(device):
            value = kernels.gate(torch.ones(1, 2, device=device)).item()
    except Exception as error:
        log.warning("Triton does not run on %s: %s; going on without its kernels", device, first_line(error))
        return False
    if not abs(value - SIGMOID_OF_ONE) < TOLERANCE:
        log.warning(
            "Triton computes %s instead of %s on %s; going on without its kernels", value, SIGMOID_OF_ONE, device
        )
        return False
    return True


def on(device: torch.device) -> AbstractContextManager:
    """Return a context whose launches go to a device; Triton launches on the current one, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
