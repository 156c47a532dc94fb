"""Tensors made from Python integers and numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def tensor_on(device: torch.device, values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> torch.Tensor:
    """Copy values to a device, asynchronously to a GPU. Integers become int64; an array keeps its dtype."""
    if device.type == "cuda":  # pin_memory() copies; torch.tensor(array, pin_memory=True) would not pin
        on_host = (
            torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
        )
        return on_host.pin_memory().to(device, non_blocking=True)
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values.copy()).to(device)
    return torch.tensor(values, dtype=torch.int64, device=device)
