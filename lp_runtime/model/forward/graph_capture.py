"""CUDA graph capture of forward passes, with cleanup after a failed capture."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from lp_runtime.errors import ModelError, first_line
from lp_runtime.kernels.dispatch import on

_one_capture = threading.Lock()  # torch captures one graph at a time in a process


class GraphCapture:
    """Captures passes of one device. They share a memory pool and a stream, so only one may run at a time.

    All captures use the same stream because cuBLAS keeps a workspace for each stream. With `refuses_waits`, passes that
    wait for the device are detected before the capture; during that check no other thread of the process may wait for a
    GPU. Without it, such a pass fails during its capture, which is then undone.
    """

    def __init__(self, device: torch.device, refuses_waits: bool = True):
        self._device, self._refuses_waits = device, refuses_waits
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what `run` launches; return a function that replays it.

        `run` launches a pass, with the same tensors in every call. It runs twice before the capture: libraries
        initialize themselves in the first run, and the second one must not wait for the device. Raises
        torch.OutOfMemoryError if there is not enough memory.
        """
        device, stream = self._device, self._stream
        graph = torch.cuda.CUDAGraph()
        with _one_capture, on(device):
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # torch.cuda.graph does not restore the stream if a capture fails
                run()
                with _refusing_waits(device) if self._refuses_waits else nullcontext():
                    run()
                # "thread_local": other threads may use the device meanwhile.
                capturing = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
                with self._closing_pool(), capturing:
                    run()
            current.wait_stream(stream)
        return graph.replay

    @contextmanager
    def _closing_pool(self) -> Iterator[None]:
        """Close the memory pool if a capture fails: torch would leave it open for later allocations."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # the pool may be closed already
                torch.cuda.memory._cuda_endAllocateToPool(self._device.index, self._pool)  # type: ignore
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(f"a pass cannot be captured: {first_line(error)}") from error


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    torch.cuda.current_stream(device).synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that the mode is a prototype and misses some waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelError(f"a pass waits for the device, and cannot be captured: {first_line(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
