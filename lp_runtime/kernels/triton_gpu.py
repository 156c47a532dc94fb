"""All Triton kernels in one module, and the small ones: the MLP's gate, and the addition with a norm.

triton_cache.py has the kernels that rotate queries and keys and write the caches; triton_attention.py and
triton_strict.py have attention; triton_experts.py and triton_router.py have mixtures of experts; triton_sampling.py
and triton_cut.py the rest. All need Triton (tests run them in its interpreter).

Letters: T tokens, E hidden size, F the MLP's inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lp_runtime.kernels.early_launch import early_launch
from lp_runtime.kernels.triton_attention import attend as attend  # `as` marks a re-export
from lp_runtime.kernels.triton_cache import rotate_and_write as rotate_and_write
from lp_runtime.kernels.triton_cache import write as write
from lp_runtime.kernels.triton_cut import can_cut as can_cut
from lp_runtime.kernels.triton_cut import cut_scores as cut_scores
from lp_runtime.kernels.triton_cut import find_cut as find_cut
from lp_runtime.kernels.triton_experts import MAX_TOKENS as MAX_TOKENS
from lp_runtime.kernels.triton_experts import ExpertWeights as ExpertWeights
from lp_runtime.kernels.triton_experts import feed_experts as feed_experts
from lp_runtime.kernels.triton_experts import gated
from lp_runtime.kernels.triton_router import can_choose as can_choose
from lp_runtime.kernels.triton_router import choose_experts as choose_experts
from lp_runtime.kernels.triton_sampling import find_in_slice as find_in_slice
from lp_runtime.kernels.triton_sampling import pack_candidates as pack_candidates
from lp_runtime.kernels.triton_sampling import sample_and_pack as sample_and_pack
from lp_runtime.kernels.triton_strict import attend_strictly as attend_strictly

GATE_BLOCK = 1024  # elements that a program computes
MAX_NORM_SIZE = 1 << 14  # largest E whose row a program can hold in registers
WARP_ELEMENTS = 512  # elements of a row per warp
MAX_WARPS = 16


@triton.jit
def _gate(gate_up, output, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    if EARLY:
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * size + places, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + places, mask=inside).to(tl.float32)
    tl.store(output + token * size + places, gated(gate, up, 0.0, 0.0, ACTIVATION), mask=inside)


def gate(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return activation(first half) * second half of contiguous `gate_up`: [..., 2 F] to [..., F].

    The activation is silu, or gelu_tanh: GELU in its approximation by tanh.
    """
    size = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (output.numel() // size, triton.cdiv(size, GATE_BLOCK))
    _gate[grid](gate_up, output, size, ACTIVATION=activation, BLOCK=GATE_BLOCK, **early_launch(gate_up.device))
    return output


@triton.jit
def _add_and_norm(
    states, added, added_weight, weight, total, normed, size, epsilon,
    HAS_ADDED: tl.constexpr, NORMS_ADDED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add to one token's row and normalize it, in one launch instead of two or three; one program per token."""
    start = tl.program_id(0).to(tl.int64) * size
    places = tl.arange(0, BLOCK)
    inside = places < size
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    added_factors = factors
    if NORMS_ADDED:
        added_factors = tl.load(added_weight + places, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    row = tl.load(states + start + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        right = tl.load(added + start + places, mask=inside, other=0.0).to(tl.float32)
        if NORMS_ADDED:
            right *= tl.rsqrt(tl.sum(right * right, 0) / size + epsilon) * added_factors
            right = right.to(total.dtype.element_ty).to(tl.float32)
        rounded = (row + right).to(total.dtype.element_ty)
        tl.store(total + start + places, rounded, mask=inside)
        row = rounded.to(tl.float32)  # normalize the rounded sum, as separate operations would
    scale = tl.rsqrt(tl.sum(row * row, 0) / size + epsilon)
    tl.store(normed + start + places, row * scale * factors, mask=inside)


def can_norm(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm` supports tensors: states contiguous, weight of their dtype or float32, E <= MAX_NORM_SIZE."""
    return weight.dtype in (states.dtype, torch.float32) and states.is_contiguous() and weight.numel() <= MAX_NORM_SIZE


def can_add_and_norm(states: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `add_and_norm` supports tensors: as `can_norm`, and `added` like `states`."""
    return (
        can_norm(states, weight)
        and states.shape == added.shape
        and states.dtype == added.dtype
        and added.is_contiguous()
    )


def norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the RMS norm over the last dimension, computed in float32: [..., E] to [..., E]."""
    return _normed(states, None, None, weight, epsilon)[1]


def add_and_norm(
    states: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    added_weight: torch.Tensor | None = None,  # weight of a norm that is applied to `added` first
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two tensors, apply RMS norm in float32, and return (sum, normalized sum), [..., T, E] each."""
    return _normed(states, added, added_weight, weight, epsilon)


def _normed(
    states: torch.Tensor,
    added: torch.Tensor | None,
    added_weight: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sum, normalized sum); `states` is the sum if nothing is added."""
    size = weight.numel()
    total = states if added is None else torch.empty_like(states)
    normed = torch.empty_like(states)
    block = triton.next_power_of_2(size)
    _add_and_norm[(states.numel() // size,)](
        states, states if added is None else added, weight if added_weight is None else added_weight, weight,
        total, normed, size, epsilon, HAS_ADDED=added is not None, NORMS_ADDED=added_weight is not None,
        BLOCK=block, num_warps=num_norm_warps(block), **early_launch(states.device),
    )  # fmt: skip
    return total, normed


def num_norm_warps(block: int) -> int:
    return max(1, min(MAX_WARPS, block // WARP_ELEMENTS))
