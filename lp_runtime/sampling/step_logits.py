"""Logits of a forward pass, converted and copied only when needed.

Letters: n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch


class StepLogits:
    """Logits of the wanted nodes, in the buffer that the forward pass has written."""

    def __init__(self, rows: torch.Tensor, presampled: torch.Tensor | None = None, is_reused: bool = False):
        # `presampled`, [n, width], are greedy samples with K top-k candidates, in the layout of sampler.py, if a
        # captured pass has computed them; valid until the next pass.
        self._rows, self.presampled = rows, presampled
        self._is_reused = is_reused  # whether the next pass overwrites `rows`, so that `logits` must be a copy

    @property
    def rows(self) -> torch.Tensor:
        """[n, V] logits in the model's dtype."""
        return self._rows

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def logits(self) -> torch.Tensor:
        """[n, V] float32 logits, computed at first use, which must precede the next pass."""
        return self.rows.to(torch.float32, copy=self._is_reused)

    def part(self, start: int, stop: int) -> StepLogits:
        presampled = None if self.presampled is None else self.presampled[start:stop]
        return StepLogits(self.rows[start:stop], presampled, self._is_reused)

    def first(self, num: int) -> StepLogits:
        return self if num == len(self) else self.part(0, num)

    def split(self, sizes: Sequence[int]) -> list[StepLogits]:
        ends = np.cumsum([0, *sizes]).tolist()
        return [self.part(*each) for each in itertools.pairwise(ends)]

    def copy(self) -> StepLogits:
        """Return a copy that stays valid when the next pass runs."""
        return StepLogits(self.rows.clone(), None if self.presampled is None else self.presampled.clone())
