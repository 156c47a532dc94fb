"""How long a forward pass takes on a device that works on its own while the host goes on."""

from __future__ import annotations

import torch


class PassTimer:
    """Times passes on a GPU by events among what is queued there; nothing waits for it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        """What is queued from now on is the pass."""
        self._record(0)

    def stop(self) -> None:
        """It ends with what is queued by now."""
        self._record(1)

    def _record(self, number: int) -> None:
        self._events[number].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """How long it took; once the host has waited for it, or for something behind it."""
        started, stopped = self._events
        return started.elapsed_time(stopped) / 1000
