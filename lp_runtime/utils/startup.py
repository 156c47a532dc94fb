"""Faster and quieter start of processes."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator


def hide_triton_without_gpu() -> None:
    """Make `import triton` fail if this process has no GPU. To be called before transformers is imported.

    transformers imports torch._dynamo, which imports Triton wherever it is installed. That takes time for nothing, and
    Triton 3.9 prints about 30 lines when a process without a GPU ends.
    """
    import torch

    with warnings.catch_warnings():
        # distributed/devices.py reports this in one line.
        warnings.filterwarnings("ignore", "CUDA initialization", UserWarning)
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # Python's way to say that there is none


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import large modules without garbage collection, and keep what was imported out of later collections.

    Modules live as long as the process. The collector would look through all of them, again and again while they are
    imported and once more as the process ends: of a process that imports torch and transformers, 2 of 5 seconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
