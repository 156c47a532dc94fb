"""Several sequences in one forward pass: every layer works on the tokens of all of them at once, and only attention,
which must not mix them, goes sequence by sequence.

Letters: P sequences, T tokens fed, of all sequences together or, T_p, of one; H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers.cache_utils import CacheLayerMixin

from lp_runtime.model.attention.mask import LayerMasks
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.stand_in import StandInCache, StandInLayer


class BatchedCache(StandInCache):
    """Stands for the caches of several sequences in one forward pass.

    Args:
        caches: [P] the sequences' caches.
        sizes: [P] tokens fed of each, T_p; they stand one sequence after another in the input.
        masks: [P] as MaskBuilder makes them.
        num_padding: tokens behind all sequences that are of none, and whose logits nobody reads.

    Attributes:
        sizes: [P + 1] tokens fed of each sequence, then of padding.
        states: [P] keys and values, [1, H, L_p + T_p, D] each, of the layer that wrote last.
        mask: what the model is given as its mask, or masks by kind of layer; `masks_of` knows what each stands for.
    """

    def __init__(
        self, caches: Sequence[TreeCache], sizes: Sequence[int], masks: Sequence[LayerMasks], num_padding: int = 0
    ):
        self.sizes = [*sizes, num_padding]
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masks: dict[int, list[torch.Tensor]] = {}
        self.mask = self._stand_in(masks)
        super().__init__(
            layers=[_BatchedLayer(self, layers) for layers in zip(*(each.layers for each in caches), strict=True)]
        )

    def _stand_in(self, masks: Sequence[LayerMasks]) -> LayerMasks:
        """Return a tensor that stands for [P] masks, or one for each kind of layer, and remember what it stands for."""
        if isinstance(masks[0], dict):  # then all are: they come from one MaskBuilder
            by_kind = cast(Sequence[dict[str, torch.Tensor]], masks)
            return {kind: self._stand_in_of_kind([each[kind] for each in by_kind]) for kind in masks[0]}
        return self._stand_in_of_kind(cast(Sequence[torch.Tensor], masks))

    def _stand_in_of_kind(self, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor that stands for [P] masks of one kind of layer, and remember the masks."""
        stand_in = torch.zeros((1, 1, 1, 1), dtype=masks[0].dtype, device=masks[0].device)
        self._masks[stand_in.data_ptr()] = list(masks)
        return stand_in

    def masks_of(self, stand_in: torch.Tensor) -> list[torch.Tensor]:
        """Return the [P] masks that a layer's mask stands for."""
        return self._masks[stand_in.data_ptr()]


class _BatchedLayer(StandInLayer):
    """One layer of several caches."""

    def __init__(self, owner: BatchedCache, layers: Sequence[CacheLayerMixin]):
        super().__init__()
        self._owner, self._layers = owner, layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each sequence's part of the new keys and values, [1, H, T, D], into its own cache; return both."""
        states = (each.split(self._owner.sizes, 2)[:-1] for each in (key_states, value_states))
        parts = zip(self._layers, *states, strict=True)
        self._owner.states = [layer.update(keys, values) for layer, keys, values in parts]
        return key_states, value_states

    def get_max_length(self) -> int:
        """Return the number of tokens that fit into the smallest of the caches."""
        return min(layer.get_max_length() for layer in self._layers)
