"""Several texts in one forward pass: every layer works on the tokens of all of them at once, and only attention, which
must not mix them, goes text by text.

Letters: P texts, T tokens fed, of all texts together or, T_p, of one; H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lp_runtime.model.attention.mask import LayerMasks
from lp_runtime.model.kv_cache.cache import TreeCache


class BatchedCache(Cache):
    """What stands for the caches of several texts in one forward pass.

    Args:
        caches: [P] theirs.
        sizes: [P] tokens fed of each, T_p; they stand one text after another in the input.
        masks: [P] as MaskBuilder makes them.
        num_filling: tokens behind all texts that are of none, and whose logits nobody reads.
    """

    def __init__(
        self, caches: Sequence[TreeCache], sizes: Sequence[int], masks: Sequence[LayerMasks], num_filling: int = 0
    ):
        self.sizes = [*sizes, num_filling]
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []  # [P] keys and values, of the last layer that wrote
        self._masks: dict[int, list[torch.Tensor]] = {}
        self.mask = self._stand_in(masks)
        super().__init__(
            layers=[_BatchedLayer(self, layers) for layers in zip(*(each.layers for each in caches), strict=True)]
        )

    def _stand_in(self, masks: Sequence[LayerMasks]) -> LayerMasks:
        """What the model is given as its mask, or masks by kind of layer: `masks_of` knows what each stands for."""
        if isinstance(masks[0], dict):
            return {kind: self._stand_in([each[kind] for each in masks]) for kind in masks[0]}
        stand_in = torch.zeros((1, 1, 1, 1), dtype=masks[0].dtype, device=masks[0].device)
        self._masks[stand_in.data_ptr()] = list(masks)
        return stand_in

    def masks_of(self, stand_in: torch.Tensor) -> list[torch.Tensor]:
        """[P] the masks that a layer was given as one."""
        return self._masks[stand_in.data_ptr()]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _BatchedLayer(CacheLayerMixin):
    """One layer of several caches."""

    is_sliding = False

    def __init__(self, owner: BatchedCache, layers: Sequence[CacheLayerMixin]):
        super().__init__()
        self._owner, self._layers = owner, layers

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each text's new states into its own cache; returns what it was given, [1, H, T, D] each."""
        states = (each.split(self._owner.sizes, 2)[:-1] for each in (key_states, value_states))
        parts = zip(self._layers, *states, strict=True)
        self._owner.states = [layer.update(keys, values) for layer, keys, values in parts]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return min(layer.get_max_length() for layer in self._layers)
