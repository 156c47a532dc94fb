"""What a forward pass found, read only as far as somebody asks for it.

Letters: n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch


class StepLogits:
    """Logits of the wanted nodes, where the forward pass has written them.

    Args:
        rows: [n, V] logits in the model's dtype.
        presampled: [n, width] int64, what greedy sampling picks from the logits with K top-k candidates, packed as
            sampling/sampler.py says, where a captured pass has computed it; valid until the next pass. None otherwise.
        is_reused: whether the next pass overwrites `rows`, so that `logits` must be a copy.

    Attributes:
        presampled: as given.
    """

    def __init__(self, rows: torch.Tensor, presampled: torch.Tensor | None = None, is_reused: bool = False):
        self._rows, self.presampled = rows, presampled
        self._is_reused = is_reused

    @property
    def rows(self) -> torch.Tensor:
        """[n, V] logits in the model's dtype."""
        return self._rows

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self._rows.device

    def __len__(self) -> int:
        """n."""
        return len(self._rows)

    @cached_property
    def logits(self) -> torch.Tensor:
        """[n, V] float32 logits, computed at the first use: before the next pass."""
        return self.rows.to(torch.float32, copy=self._is_reused)

    def part(self, start: int, stop: int) -> StepLogits:
        """Return what was found of the nodes from `start` up to `stop`."""
        presampled = None if self.presampled is None else self.presampled[start:stop]
        return StepLogits(self.rows[start:stop], presampled, self._is_reused)

    def first(self, num: int) -> StepLogits:
        """Return what was found of the first `num` nodes."""
        return self if num == len(self) else self.part(0, num)

    def split(self, sizes: Sequence[int]) -> list[StepLogits]:
        """Return what was found of the first nodes, of those behind them, and so on.

        Args:
            sizes: nodes of each part; their sum is n.
        """
        ends = np.cumsum([0, *sizes]).tolist()
        return [self.part(*each) for each in itertools.pairwise(ends)]

    def copy(self) -> StepLogits:
        """Return what stays valid when the next pass runs."""
        return StepLogits(self.rows.clone(), None if self.presampled is None else self.presampled.clone())
