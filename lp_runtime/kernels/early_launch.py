"""Launches that overlap the end of the kernel before, on GPUs of compute capability 9.0 and higher.

A captured pass launches about 370 short kernels one after another. With programmatic dependent launch a kernel's
programs are placed while the kernel before it ends, and wait with `gdc_wait` before they read what others have written.
Before that they may read a step's inputs and the model's weights, which no kernel of a pass writes.
"""

from __future__ import annotations

import functools

import torch

MIN_CAPABILITY = (9, 0)


def early_launch(device: torch.device) -> dict[str, bool]:
    """Return arguments of a kernel that has the constant EARLY."""
    return {"EARLY": True, "launch_pdl": True} if _can_launch_early(device) else {"EARLY": False}


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
