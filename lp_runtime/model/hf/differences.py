"""Difference between two computations of the same logits, and how large it may be."""

from __future__ import annotations

import torch

from lp_runtime.errors import ModelError

# Largest relative difference of a node's logits, ||tree - plain|| / ||plain||, each minus its mean. Rounding alone is
# an order of magnitude below; a wrong mask or position is far above.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 4e-2, torch.bfloat16: 2e-1}


def tolerance_of(name: str, dtype: torch.dtype) -> float:
    """Return the tolerance of a dtype; refuse a model, `name`, that computes in any other."""
    if dtype not in TOLERANCES:
        raise ModelError(f"{name} computes in {dtype}: must be one of {', '.join(map(str, TOLERANCES))}")
    return TOLERANCES[dtype]


def difference_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| of logits minus their mean; NaN if any of them is NaN.

    Equal infinite logits count as no difference: some models have a bias of -inf on tokens they never emit.
    """
    is_equal = actual.isinf() & (actual == expected)
    actual, expected = actual.masked_fill(is_equal, 0), expected.masked_fill(is_equal, 0)
    actual, expected = actual - actual.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()
