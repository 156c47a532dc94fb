"""Difference between two computations of the same logits, and how large it may be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import torch

from lp_runtime.errors import ModelError

# Largest relative difference of a node's logits, ||tree - plain|| / ||plain||, each minus its mean. Rounding alone is
# an order of magnitude below; a wrong mask or position is far above.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 4e-2, torch.bfloat16: 2e-1}
NUM_TEXTS = 16  # that a model in 16 bits is checked with, until one has no larger difference


def tolerance_of(name: str, dtype: torch.dtype) -> float:
    """Return the tolerance of a dtype; refuse a model, `name`, that computes in any other."""
    if dtype not in TOLERANCES:
        raise ModelError(f"{name} computes in {dtype}: must be one of {', '.join(map(str, TOLERANCES))}")
    return TOLERANCES[dtype]


def difference_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| of logits minus their mean; NaN if any of them is NaN.

    Equal infinite logits count as no difference: some models have a bias of -inf on tokens they never emit.
    """
    errors, sizes = _row_norms(actual, expected)
    return (errors.norm() / sizes.norm().clamp_min(1e-12)).item()


def row_differences(actual: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return `difference_of` of each row of [n, V] logits."""
    errors, sizes = _row_norms(actual, expected)
    return (errors / sizes.clamp_min(1e-12)).tolist()


def _row_norms(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_equal = actual.isinf() & (actual == expected)
    actual, expected = actual.masked_fill(is_equal, 0), expected.masked_fill(is_equal, 0)
    actual, expected = actual - actual.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return (actual - expected).norm(dim=-1), expected.norm(dim=-1)


def lasting_difference(compare: Callable[[random.Random], Iterable[float]], seed: int, dtype: torch.dtype) -> float:
    """Return the largest difference that stays at the same place of several random texts; NaN if any is NaN.

    In a mixture of experts, rounding in 16 bits sends some tokens to other experts, and their logits then differ by
    more than the tolerance. Which tokens depends on the text. A wrong mask or position shows in every text.

    `compare` draws a text and returns the differences at its places, in the same order in each call.
    """
    least: list[float] = []
    for number in range(NUM_TEXTS if dtype.itemsize == 2 else 1):
        differences = list(compare(random.Random(seed + 1000 * number)))
        least = [min(pair) for pair in zip(least, differences, strict=True)] if least else differences
        if any(map(math.isnan, differences)):
            return math.nan
        if max(least) <= TOLERANCES.get(dtype, 0.0):
            break
    return max(least)
