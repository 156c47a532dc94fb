"""Duration of a forward pass on a GPU, measured without making the host wait."""

from __future__ import annotations

import torch


class PassTimer:
    """Timer of forward passes by CUDA events on the current stream; neither host nor GPU waits for them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._started = torch.cuda.Event(enable_timing=True)
        self._stopped = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._started.record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        self._stopped.record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """Return the duration of the last forward pass, in seconds.

        The host must have waited for the end of the pass, or for something queued after it.
        """
        return self._started.elapsed_time(self._stopped) / 1000
