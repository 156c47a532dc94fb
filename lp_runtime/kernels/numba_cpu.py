"""Numba CPU kernels for small models: RMS norms, and rotary embedding into the KV cache.

torch needs several operations for each, which for the few tokens of a step cost more to launch than to compute. The
kernels support float32 only and run on one thread; torch handles large inputs.

Letters: T tokens, E hidden size, H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from lp_runtime.errors import first_line
from lp_runtime.kernels.numba_loops import compile_loops, loops
from lp_runtime.utils.jit import compiles

log = logging.getLogger(__name__)

MAX_SIZE = 1 << 17  # elements of an input; above this, torch's threads are faster


def supports(states: torch.Tensor) -> bool:
    """Whether the kernels support a tensor: float32 on a CPU, contiguous, small, without gradients."""
    return (
        states.dtype is torch.float32
        and states.numel() <= MAX_SIZE
        and states.is_cpu
        and not states.requires_grad
        and states.is_contiguous()
        and _can_run()
    )


def norm(states: torch.Tensor, weight: np.ndarray, epsilon: float) -> torch.Tensor:
    """Return the RMS norm over the last dimension, [..., E] float32: x w / sqrt(mean(x^2) + epsilon)."""
    rows = states.numpy()
    normed = np.empty_like(rows)
    loops()[0](rows.reshape(-1, len(weight)), weight, epsilon, normed.reshape(-1, len(weight)))
    return torch.from_numpy(normed)


def add_and_norm(
    states: torch.Tensor, added: torch.Tensor, weight: np.ndarray, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two tensors and apply `norm` to the sum; return (sum, normalized sum), [..., E] float32 each."""
    rows = states.numpy()
    total, normed = np.empty_like(rows), np.empty_like(rows)
    shape = (-1, len(weight))
    arrays = (each.reshape(shape) for each in (rows, added.numpy(), total, normed))
    loops()[1](*arrays, weight, epsilon)
    return torch.from_numpy(total), torch.from_numpy(normed)


def rotate_and_write(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    first: tuple[int, int, int],  # index of the first head of queries, keys and values in their arrays
    sizes: tuple[int, int],  # (g H, H)
    cos: np.ndarray,  # [1, T, D]
    sin: np.ndarray,  # [1, T, D]
    start: int,  # index of the first token in the cache
    keys: np.ndarray,  # [1, H, capacity, D], written to
    values: np.ndarray,  # [1, H, capacity, D], written to
) -> torch.Tensor:
    """Write rotated keys, and values, to a cache; return rotated queries, [1, g H, T, D] float32.

    Rotary embedding is x cos + (-x2, x1) sin, with x1 and x2 the halves of x. All arrays are float32 and contiguous.
    `query`, `key` and `value`, [1, T, heads, D], may be the same array, holding the heads of all three in turn.
    """
    _, num_tokens, _, size = query.shape
    assert start + num_tokens <= keys.shape[2]
    rotated = np.empty((1, sizes[0], num_tokens, size), np.float32)
    loops()[2](query, key, value, cos, sin, *first, *sizes, start, rotated, keys, values)
    return torch.from_numpy(rotated)


@functools.lru_cache(maxsize=4)  # tensors hash by identity
def array_of(states: torch.Tensor) -> np.ndarray:
    """Return a tensor as a contiguous array; cached, because all layers of a pass ask for the same tensor."""
    return states.contiguous().numpy()


@functools.cache
def _can_run() -> bool:
    """Compile the kernels, or load them from disk, and return whether they compute correct results."""
    try:
        _try_kernels()
    except Exception as error:
        log.warning("kernels for the CPU do not run: %s; going on without", first_line(error))
        return False
    return True


@compiles
def _try_kernels() -> None:
    """Compile the kernels, or load them from disk, and raise ArithmeticError if a result is wrong."""
    compile_loops()
    loops.cache_clear()
    ones = np.ones(2, np.float32)
    normed = norm(torch.tensor([[3.0, 4.0]]), ones, 0.0)
    added = add_and_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), ones, 0.0)
    sums = torch.tensor([3.0, 4.0])
    expected = sums / 12.5**0.5
    states = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 3, 2)
    cos, sin = np.array([[[[0, 0]]], [[[1, 1]]]], np.float32)
    cache = np.zeros((2, 1, 1, 1, 2), np.float32)
    rotated = rotate_and_write(states, states, states, (0, 1, 2), (1, 1), cos, sin, 0, cache[0], cache[1])
    ours = torch.cat(
        [*(each.view(-1) for each in (normed, *added)), rotated.view(-1), torch.from_numpy(cache).view(-1)]
    )
    right = torch.cat([expected, sums, expected, torch.tensor([-2.0, 1.0, -4.0, 3.0, 5.0, 6.0])])
    if not torch.allclose(ours, right):
        raise ArithmeticError(f"{ours.tolist()} instead of {right.tolist()}")
