"""Passes of a shard whose model has a slice of the head: a tree's logits stay on the shards, a slice on each.

Letters: n nodes whose successors are wanted, V vocabulary, P shards, v tokens of this shard's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from transformers import PreTrainedModel

from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.forward.cuda_graph import PassSize
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.hf.rotary_lengths import RotaryLengths
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.tensor_parallel.layers import GatheredLinear
from lp_runtime.sampling.sampler import GREEDY_PACKING
from lp_runtime.sampling.slices import Draw, SlicedLogits, VocabularySlice
from lp_runtime.sampling.step_logits import StepLogits
from lp_runtime.sampling.truncation import Truncation

GREEDY = Draw(GREEDY_PACKING, Truncation(), key=None, positions=())  # what passes of fixed sizes sample themselves


class SlicedPasses(Passes):
    """As Passes, but that passes of trees return [n, v]: this shard's slice of the logits.

    Args:
        model: see Passes.
        masks: see Passes.
        strict_tokens: see Passes.
        lengths: see Passes.
        head: the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: MaskBuilder,
        strict_tokens: int | None,
        lengths: RotaryLengths,
        head: GatheredLinear,
    ):
        super().__init__(model, masks, strict_tokens, lengths)
        self._head, self._vocabulary = head, VocabularySlice(head.shard, head.sizes, model.device)
        self._logits, self._number = torch.empty(0), 0  # of the last tree's pass, and how many there were

    def share(self, caches: Sequence[TreeCache], layout: InputLayout, length: int = 0) -> torch.Tensor:
        return self._keep(lambda: super(SlicedPasses, self).share(caches, layout, length))

    def shares(self, caches: Sequence[TreeCache], layouts: Sequence[InputLayout]) -> torch.Tensor:
        return self._keep(lambda: super(SlicedPasses, self).shares(caches, layouts))

    def make_fixed(self, caches: Sequence[TreeCache], size: PassSize) -> torch.Tensor:
        return self._in_slices(lambda: super(SlicedPasses, self).make_fixed(caches, size))

    def fixed(self, caches: Sequence[TreeCache], size: PassSize, pieces: Sequence[tuple]) -> torch.Tensor:
        return self._keep(lambda: super(SlicedPasses, self).fixed(caches, size, pieces))

    def _sample(self, logits: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        return self._vocabulary.pack(self._head.gather(self._vocabulary.find(logits, GREEDY)), GREEDY)

    def _keep(self, feed: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._logits = self._in_slices(feed)
        self._number += 1
        return self._logits

    def _in_slices(self, feed: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what a pass returns whose logits stay on the shards."""
        self._head.mode.is_whole = False
        try:
            return feed()
        finally:
            self._head.mode.is_whole = True

    @torch.inference_mode()
    def read(self, caches: Sequence[TreeCache], number: int, start: int, stop: int) -> torch.Tensor:
        """Put together the logits of rows `start` to `stop` of the tree's pass of this number, the last: [n, V]."""
        return self._head.put_together(self._rows(number, start, stop))

    @torch.inference_mode()
    def find(self, caches: Sequence[TreeCache], number: int, start: int, stop: int, draw: Draw) -> torch.Tensor:
        """Find what a draw needs in rows `start` to `stop` of the tree's pass of this number, the last: [P, n, width],
        what was found in each slice."""
        return self._head.gather(self._vocabulary.find(self._rows(number, start, stop), draw))

    def _rows(self, number: int, start: int, stop: int) -> torch.Tensor:
        assert number == self._number, "logits are read before the next pass"
        return self._logits[start:stop]

    def found(
        self, logits: torch.Tensor, feed: Callable[..., torch.Tensor], presampled: torch.Tensor | None = None
    ) -> StepLogits:
        number = self._number

        def read(start: int, stop: int) -> torch.Tensor:
            return feed("read", [], number, start, stop)

        def find(start: int, stop: int, draw: Draw) -> torch.Tensor:
            return feed("find", [], number, start, stop, draw)

        if not self._vocabulary.can_find:
            return StepLogits(read(0, len(logits)))
        return SlicedLogits(self._vocabulary, read, find, range(len(logits)), presampled)


def make_passes(
    model: PreTrainedModel, masks: MaskBuilder, strict_tokens: int | None, lengths: RotaryLengths
) -> Passes:
    """Return what runs a model, or a shard of one, in passes of any size. Arguments as those of Passes."""
    head = model.get_output_embeddings()
    if isinstance(head, GatheredLinear):
        return SlicedPasses(model, masks, strict_tokens, lengths, head)
    return Passes(model, masks, strict_tokens, lengths)
