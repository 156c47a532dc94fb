"""Faster start-up of processes, with fewer warnings."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator


def hide_triton_without_gpu() -> None:
    """Make `import triton` fail if this process has no GPU; call it before importing transformers.

    transformers imports torch._dynamo, which imports Triton wherever it is installed. Without a GPU that only costs
    time, and Triton 3.9 prints about 30 lines at exit.
    """
    import torch

    with warnings.catch_warnings():
        # distributed/devices.py reports this in one line.
        warnings.filterwarnings("ignore", "CUDA initialization", UserWarning)
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # a None entry makes the import fail


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during heavy imports, and exempt their objects from later collections.

    Modules live as long as the process, but the collector would scan them repeatedly during the imports and once more
    at exit: 2 of the 5 seconds of a process that imports torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
