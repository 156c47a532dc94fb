"""Recognition of allocations that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lp_runtime.errors import first_line

ALLOCATION_ERRORS = (torch.OutOfMemoryError, MemoryError)
HOST_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # torch raises a plain RuntimeError with this text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or the host; torch and the GPU's context still work after it."""
    return isinstance(error, ALLOCATION_ERRORS) or HOST_ALLOCATOR in str(error)


@contextmanager
def out_of_memory_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Replace the error of a failed allocation in the `with` block by `make(reason)`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    else:
        return
    raise make(reason)
