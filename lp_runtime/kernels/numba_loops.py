"""Loops of the CPU kernels in numba_cpu.py. No torch is imported, so that a process can compile while others import.

Letters: T tokens, E hidden size. All arrays are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from lp_runtime.utils.jit import bound, compiled, compiles

ORDER_IS_FREE = frozenset({"reassoc", "contract", "nsz"})  # fastmath flags: sums may be reordered and so vectorized


@compiles
def compile_loops() -> None:
    loops()


@functools.cache
def loops() -> tuple[Callable, Callable, Callable]:
    """Return the loops, bound to types: Numba's dispatch would take longer than some of the calls."""
    row, rows, tokens, heads = (np.zeros((1,) * num, np.float32) for num in range(1, 5))
    return (
        bound(_norm, rows, row, 0.0, rows),
        bound(_add_and_norm, *[rows] * 4, row, 0.0),
        bound(_rotate_and_write, *[heads] * 3, *[tokens] * 2, *[0] * 6, *[heads] * 3),
    )


@compiled(fastmath=ORDER_IS_FREE)
def _norm(states: np.ndarray, weight: np.ndarray, epsilon: float, normed: np.ndarray) -> None:
    """Write to `normed`, [T, E], the rows of `states`, [T, E], normalized and multiplied by `weight`, [E]."""
    size = states.shape[1]
    for token in range(states.shape[0]):
        total = np.float32(0.0)
        for place in range(size):
            total += states[token, place] * states[token, place]
        factor = np.float32(1.0 / np.sqrt(total / size + epsilon))
        for place in range(size):
            normed[token, place] = states[token, place] * factor * weight[place]


@compiled(fastmath=ORDER_IS_FREE)
def _add_and_norm(
    states: np.ndarray, added: np.ndarray, total: np.ndarray, normed: np.ndarray, weight: np.ndarray, epsilon: float
) -> None:
    """Write to `total` the sum of `states` and `added`, and to `normed` its normalization: [T, E] each."""
    for token in range(states.shape[0]):
        for place in range(states.shape[1]):
            total[token, place] = states[token, place] + added[token, place]
    _norm(total, weight, epsilon, normed)


@compiled(fastmath=ORDER_IS_FREE)
def _rotate_and_write(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    first_query: int,
    first_key: int,
    first_value: int,
    num_queries: int,
    num_keys: int,
    start: int,
    rotated: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
) -> None:
    half = query.shape[3] // 2
    for token in range(query.shape[1]):
        at = start + token
        for head in range(num_queries):
            source = first_query + head
            for low in range(half):
                high = low + half
                x, y = query[0, token, source, low], query[0, token, source, high]
                rotated[0, head, token, low] = x * cos[0, token, low] - y * sin[0, token, low]
                rotated[0, head, token, high] = y * cos[0, token, high] + x * sin[0, token, high]
        for head in range(num_keys):  # not a function shared with the loop above: that took twice as long, unvectorized
            source = first_key + head
            for low in range(half):
                high = low + half
                x, y = key[0, token, source, low], key[0, token, source, high]
                keys[0, head, at, low] = x * cos[0, token, low] - y * sin[0, token, low]
                keys[0, head, at, high] = y * cos[0, token, high] + x * sin[0, token, high]
            source = first_value + head
            for place in range(2 * half):
                values[0, head, at, place] = value[0, token, source, place]
