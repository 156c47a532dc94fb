"""Tensors from integers and arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def tensor_on(device: torch.device, values: Sequence | np.ndarray) -> torch.Tensor:
    """Integers as int64, or an array as it is, copied to a device; on a GPU nothing waits for the copy."""
    is_array = isinstance(values, np.ndarray)
    if device.type == "cpu" and is_array:
        return torch.from_numpy(values.copy())
    if device.type != "cuda":
        return torch.tensor(values, dtype=None if is_array else torch.int64, device=device)
    # What is pinned is a copy, too; torch.tensor does not pin what it makes of an array.
    pinned = (torch.from_numpy(values) if is_array else torch.tensor(values, dtype=torch.int64)).pin_memory()
    return pinned.to(device, non_blocking=True)
