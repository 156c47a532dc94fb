"""Triton kernel that adds to the residual stream and normalizes the sum, in one launch instead of two.

Letters: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lp_runtime.kernels.early_launch import early_launch

MAX_NORM_SIZE = 1 << 14  # largest E whose row a program can hold in registers
WARP_ELEMENTS = 512  # elements of a row per warp
MAX_WARPS = 16


@triton.jit
def _add_and_norm(
    states, added, weight, total, normed, size, epsilon, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Add and normalize one token's row; one program per token."""
    start = tl.program_id(0).to(tl.int64) * size
    places = tl.arange(0, BLOCK)
    inside = places < size
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    left = tl.load(states + start + places, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(added + start + places, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + start + places, rounded, mask=inside)
    row = rounded.to(tl.float32)  # normalize the rounded sum, as separate operations would
    scale = tl.rsqrt(tl.sum(row * row, 0) / size + epsilon)
    tl.store(normed + start + places, row * scale * factors, mask=inside)


def can_add_and_norm(states: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `add_and_norm` supports tensors: same shape and dtype, contiguous, E <= MAX_NORM_SIZE."""
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
    """Add two tensors, apply RMS norm in float32, and return (sum, normalized sum), [..., T, E] each."""
    size = weight.numel()
    total, normed = torch.empty_like(states), torch.empty_like(states)
    block = triton.next_power_of_2(size)
    _add_and_norm[(states.numel() // size,)](
        states, added, weight, total, normed, size, epsilon,
        BLOCK=block, num_warps=num_norm_warps(block), **early_launch(states.device),
    )  # fmt: skip
    return total, normed


def num_norm_warps(block: int) -> int:
    return max(1, min(MAX_WARPS, block // WARP_ELEMENTS))
