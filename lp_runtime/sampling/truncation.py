"""Temperature, top_k and top_p as numbers: what the sampling kernel does itself, without processed logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers.generation import logits_process as library

WARPERS = (library.TemperatureLogitsWarper, library.TopKLogitsWarper, library.TopPLogitsWarper)  # in their order


class Truncation(NamedTuple):
    """Scaling and cuts of one request.

    Attributes:
        temperature: what the logits are divided by.
        top_k: tokens that are kept; None for all.
        top_p: probability that is kept; None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    @property
    def inverse_temperature(self) -> float:
        """Factor of the logits, in float32. A GPU multiplies by it where torch divides by a number."""
        return float(np.float32(1) / np.float32(self.temperature))

    @property
    def cuts(self) -> bool:
        """Whether any token is removed."""
        return self.top_k is not None or self.top_p is not None


def temperature_of(processors: Sequence[object]) -> float:
    """Return what the temperatures among a request's logits processors divide logits by, all together."""
    return math.prod(each.temperature for each in processors if isinstance(each, library.TemperatureLogitsWarper))


def truncation_of(processors: Sequence[object]) -> Truncation | None:
    """Return what a request's logits processors do; None if that is more than to scale and to cut.

    Args:
        processors: of transformers or the caller's, in the order in which they are applied.
    """
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
