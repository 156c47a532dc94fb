"""A max-heap of integers in an array. Compiled by Numba."""

from __future__ import annotations

import numpy as np

from lp_runtime.utils.jit import Int, inlined


@inlined
def sift_up(heap: np.ndarray, at: Int) -> None:
    """Restore a max-heap after its element `at` was added."""
    while at > 0:
        above = (at - 1) >> 1
        if heap[above] >= heap[at]:
            return
        heap[above], heap[at] = heap[at], heap[above]
        at = above


@inlined
def pop(heap: np.ndarray, size: Int) -> Int:
    """Remove and return the largest element of a heap of `size` elements."""
    top, last = heap[0], heap[size - 1]
    size -= 1
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1] > heap[below]:
            below += 1
        if heap[below] <= last:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last
    return top
