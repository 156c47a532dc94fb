"""Recorder of the logits and scores of accepted tokens, for callers of the drop-in that ask for them."""

from __future__ import annotations

import torch

from lp_runtime.decoder.decoder import Samples
from lp_runtime.decoder.step import Step
from lp_runtime.distributed.exchange import merge_rows
from lp_runtime.distributed.transport.group import Group


class Recorder:
    """Recorder of the logits and scores that accepted tokens were chosen from; an engine's Observer.

    `scores` and `logits` have the [V] processed and the model's [V] logits of each accepted token.
    """

    def __init__(self, vocabulary_size: int, group: Group):
        self._size, self._group = vocabulary_size, group
        self._num_merged = 0
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def __call__(self, nodes: list[int], step: Step, rank: int, samples: Samples) -> None:
        """Record the accepted nodes of a step. Rows of nodes that another rank owns are -inf until `merge`."""
        row_of = {node: row for row, node in enumerate(step.shares[rank].owned.tolist())}
        for node in nodes:
            for recorded, values in ((self.scores, samples.scores), (self.logits, samples.logits)):
                row = row_of.get(node)
                missing = values.new_full((self._size,), float("-inf"))
                recorded.append(missing if row is None else values[row].clone())

    def merge(self) -> None:
        """Fill in other ranks' rows recorded since the last call. A collective: all ranks must call it."""
        first, self._num_merged = self._num_merged, len(self.scores)
        if not self._group.is_alone and first < self._num_merged:
            for recorded in (self.scores, self.logits):
                recorded[first:] = merge_rows(torch.stack(recorded[first:]), self._group).unbind()
