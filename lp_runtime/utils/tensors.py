"""Tensors from Python integers and numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def tensor_on(device: torch.device, values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> torch.Tensor:
    """Return a copy of values on a device; on a GPU nothing waits for the copy.

    Args:
        device: where the tensor goes.
        values: integers, nested to any depth, which become int64; or an array, whose type is kept.
    """
    if device.type == "cuda":  # pinning makes a copy; torch.tensor does not pin what it makes of an array
        on_host = (
            torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
        )
        return on_host.pin_memory().to(device, non_blocking=True)
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values.copy()).to(device)
    return torch.tensor(values, dtype=torch.int64, device=device)
