"""Captures forward passes as CUDA graphs, and leaves everything as it was where one cannot be captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from lp_runtime.errors import ModelError, first_line
from lp_runtime.kernels.dispatch import on

_one_capture = threading.Lock()  # torch captures one graph at a time in a process


class GraphCapture:
    """Captures passes of one device, which share a memory pool and a stream: only one of them runs at a time.

    cuBLAS keeps a workspace for each stream that it has worked on, so there is one stream for all captures.

    Args:
        device: the GPU.
        refuses_waits: whether a pass that waits for the device is refused before its capture begins. While that is
            looked for, no other thread of the process may wait for a GPU. Without it the capture fails, and leaves
            everything as it was.

    Attributes:
        count: graphs captured so far.
    """

    def __init__(self, device: torch.device, refuses_waits: bool = True):
        self._device, self._refuses_waits = device, refuses_waits
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.count = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what a function launches, and return a function that launches it again.

        The function runs twice before: libraries initialize themselves at first, and then nothing may wait for the
        device.

        Args:
            run: launches a pass, with the same tensors whenever it is called.

        Raises:
            ModelError: if a pass waits for the device, or cannot be captured for another reason.
            torch.OutOfMemoryError: if memory does not suffice.
        """
        device, stream = self._device, self._stream
        graph = torch.cuda.CUDAGraph()
        with _one_capture, on(device):
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # torch.cuda.graph leaves its stream current where a capture fails
                run()
                with _refusing_waits(device) if self._refuses_waits else nullcontext():
                    run()
                # Other threads may use the device meanwhile.
                capturing = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
                with self._closing_pool(), capturing:
                    run()
            current.wait_stream(stream)
        self.count += 1
        return graph.replay

    @contextmanager
    def _closing_pool(self) -> Iterator[None]:
        """Have a capture that fails leave no pool open that takes what is allocated later, as torch does.

        Raises:
            ModelError: if the capture fails.
        """
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # it may be closed already
                torch.cuda.memory._cuda_endAllocateToPool(self._device.index, self._pool)  # type: ignore
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(f"a pass cannot be captured: {first_line(error)}") from error


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    """Refuse what waits for the device, for the duration of a `with` block.

    Raises:
        ModelError: if something has waited, or failed.
    """
    torch.cuda.current_stream(device).synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelError(f"a pass waits for the device, and cannot be captured: {first_line(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
