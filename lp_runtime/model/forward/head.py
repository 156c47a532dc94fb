"""Passes with a sliced LM head: each shard keeps the logits of its slice of the vocabulary.

Letters: n nodes whose successors are wanted, V vocabulary, P shards, v tokens of this shard's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.forward.passes import TREE_PASSES, Feed, MakeFixed, Pass, Passes
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.tensor_parallel.layers import GatheredLinear
from lp_runtime.sampling.sampler import GREEDY_PACKING
from lp_runtime.sampling.slices import SampleRequest, SlicedLogits, VocabularySlice
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sampling.truncation import Truncation

GREEDY = SampleRequest(GREEDY_PACKING, Truncation(), key=None, positions=())  # sampled inside passes of fixed sizes


class SlicedPasses(Passes):
    """Passes that return only this shard's slice of tree logits, [n, v]; `ReadRows` gathers whole rows."""

    def __init__(self, model: PreTrainedModel, masks: MaskBuilder, strict_tokens: int | None, head: GatheredLinear):
        super().__init__(model, masks, strict_tokens)
        self._head, self._vocabulary = head, VocabularySlice(head.shard, head.sizes, model.device)
        self._logits, self._number = torch.empty(0), 0  # slice of the last tree pass, and number of tree passes so far

    def run(self, work: Pass, caches: Sequence[TreeCache]) -> torch.Tensor:
        def feed() -> torch.Tensor:
            return super(SlicedPasses, self).run(work, caches)

        if isinstance(work, TREE_PASSES):
            self._number += 1  # even if the pass fails, so that all shards have the same number
            self._logits = self._in_slices(feed)
            return self._logits
        return self._in_slices(feed) if isinstance(work, MakeFixed) else feed()

    def sample(self, logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        return self._vocabulary.pack(self._head.gather(self._vocabulary.find(logits, GREEDY)), GREEDY)

    def _in_slices(self, feed: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a pass with the head returning this shard's slice instead of gathered logits."""
        self._head.mode.is_whole = False
        try:
            return feed()
        finally:
            self._head.mode.is_whole = True

    def read(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Gather the whole logits, [n, V], of rows `start` to `stop` of tree pass `number`: the last one."""
        return self._head.put_together(self._rows(number, start, stop))

    def find(self, number: int, start: int, stop: int, wanted: SampleRequest) -> torch.Tensor:
        """Gather what sampling needs from each slice, [P, n, width]; rows and `number` as in `read`."""
        return self._head.gather(self._vocabulary.find(self._rows(number, start, stop), wanted))

    def _rows(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Return rows of the last tree pass's slice; an assertion checks that `number` is that pass."""
        assert number == self._number, "logits are read before the next pass"
        return self._logits[start:stop]

    def step_logits(self, logits: torch.Tensor, feed: Feed, presampled: torch.Tensor | None = None) -> StepLogits:
        number = self._number

        def read(start: int, stop: int) -> torch.Tensor:
            return feed(ReadRows(number, start, stop))

        def find(start: int, stop: int, wanted: SampleRequest) -> torch.Tensor:
            return feed(FindInSlices(number, start, stop, wanted))

        if not self._vocabulary.can_find:
            return StepLogits(read(0, len(logits)))
        return SlicedLogits(self._vocabulary, read, find, range(len(logits)), presampled)


class ReadRows(NamedTuple):
    number: int
    start: int
    stop: int

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        assert isinstance(passes, SlicedPasses)
        return passes.read(*self)


class FindInSlices(NamedTuple):
    number: int
    start: int
    stop: int
    wanted: SampleRequest

    def run(self, passes: Passes, caches: Sequence[TreeCache]) -> torch.Tensor:
        assert isinstance(passes, SlicedPasses)
        return passes.find(*self)


def make_passes(model: PreTrainedModel, masks: MaskBuilder, strict_tokens: int | None) -> Passes:
    head = model.get_output_embeddings()
    if isinstance(head, GatheredLinear):
        return SlicedPasses(model, masks, strict_tokens, head)
    return Passes(model, masks, strict_tokens)
