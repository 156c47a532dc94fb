"""Temperature, top_k and top_p as numbers, for sampling kernels that need no processed logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers.generation import logits_process as library

CUTTABLE = (library.TemperatureLogitsWarper, library.TopKLogitsWarper, library.TopPLogitsWarper)  # in this order


class Truncation(NamedTuple):
    """Temperature, the divisor of the logits, and cutoffs of one request; None for no cutoff."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    @property
    def inverse_temperature(self) -> float:
        """Factor of the logits, as float32: to divide by a scalar on a GPU, torch multiplies by it, too."""
        return float(np.float32(1) / np.float32(self.temperature))

    @property
    def cuts(self) -> bool:
        return self.top_k is not None or self.top_p is not None


def temperature_of(processors: Sequence[object]) -> float:
    return math.prod(each.temperature for each in processors if isinstance(each, library.TemperatureLogitsWarper))


def truncation_of(processors: Sequence[object]) -> Truncation | None:
    """Return the processors' effect as temperature, top_k and top_p; None if they do anything else."""
    kinds = [type(processor) for processor in processors]
    if kinds != [kind for kind in CUTTABLE if kind in kinds]:
        return None
    by_kind: dict[type, Any] = dict(zip(kinds, processors, strict=True))
    temperature, top_k, top_p = map(by_kind.get, CUTTABLE)
    if any(cut is not None and cut.filter_value != -math.inf for cut in (top_k, top_p)):
        return None
    if top_p is not None and top_p.min_tokens_to_keep != 1:
        return None
    return Truncation(
        getattr(temperature, "temperature", 1.0), getattr(top_k, "top_k", None), getattr(top_p, "top_p", None)
    )
