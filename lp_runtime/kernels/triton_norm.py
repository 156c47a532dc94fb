"""A Triton kernel that adds to the residual stream and normalizes the sum: one launch in place of two.

Letters: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_NORM_SIZE = 1 << 14  # E of the largest row that a program holds in registers
WARP_ELEMENTS = 512  # of a row, for each warp
MAX_WARPS = 16


@triton.jit
def _add_and_norm(states, added, weight, total, normed, size, epsilon, BLOCK: tl.constexpr):
    """Add and normalize one token's row; a program for each token."""
    start = tl.program_id(0).to(tl.int64) * size
    places = tl.arange(0, BLOCK)
    inside = places < size
    left = tl.load(states + start + places, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(added + start + places, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + start + places, rounded, mask=inside)
    row = rounded.to(tl.float32)  # the norm is that of the sum as it is stored
    scale = tl.rsqrt(tl.sum(row * row, 0) / size + epsilon)
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + places, row * scale * factors, mask=inside)


def can_add_and_norm(states: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `add_and_norm` takes these tensors: one shape and dtype, contiguous, rows of MAX_NORM_SIZE at most."""
    return (
        states.shape == added.shape
        and states.dtype == added.dtype == weight.dtype
        and states.is_contiguous()
        and added.is_contiguous()
        and weight.numel() <= MAX_NORM_SIZE
    )


def add_and_norm(
    states: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum and its root-mean-square normalization, computed in float32.

    Args:
        states: [..., T, E], contiguous.
        added: [..., T, E], contiguous, of the same dtype.
        weight: [E], contiguous.
        epsilon: added to the mean square.

    Returns:
        (states + added, the sum normalized and multiplied by `weight`), [..., T, E] each.
    """
    size = weight.numel()
    total, normed = torch.empty_like(states), torch.empty_like(states)
    block = triton.next_power_of_2(size)
    _add_and_norm[(states.numel() // size,)](
        states, added, weight, total, normed, size, epsilon,
        BLOCK=block, num_warps=num_norm_warps(block),
    )  # fmt: skip
    return total, normed


def num_norm_warps(block: int) -> int:
    """Return how many warps hold a row of `block` elements, a power of two."""
    return max(1, min(MAX_WARPS, block // WARP_ELEMENTS))
