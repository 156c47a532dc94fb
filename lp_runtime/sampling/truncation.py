"""Temperature, top_k and top_p as numbers, for sampling kernels that need no processed logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers.generation import logits_process as library

WARPERS = (library.TemperatureLogitsWarper, library.TopKLogitsWarper, library.TopPLogitsWarper)  # in this order


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
        """Whether any token is removed."""
        return self.top_k is not None or self.top_p is not None


def temperature_of(processors: Sequence[object]) -> float:
    """Return the product of all temperatures among a request's logits processors."""
    return math.prod(each.temperature for each in processors if isinstance(each, library.TemperatureLogitsWarper))


def truncation_of(processors: Sequence[object]) -> Truncation | None:
    """Return the processors' effect as temperature, top_k and top_p; None if they do anything else."""
    kinds = [type(processor) for processor in processors]
    if kinds != [kind for kind in WARPERS if kind in kinds]:
        return None
    truncation = Truncation()
    for processor in processors:
        if isinstance(processor, library.TemperatureLogitsWarper):
            truncation = truncation._replace(temperature=processor.temperature)
        elif isinstance(processor, library.TopKLogitsWarper | library.TopPLogitsWarper):
            if processor.filter_value != -math.inf:
                return None
            if isinstance(processor, library.TopKLogitsWarper):
                truncation = truncation._replace(top_k=processor.top_k)
            elif processor.min_tokens_to_keep == 1:
                truncation = truncation._replace(top_p=processor.top_p)
            else:
                return None
    return truncation
