"""KV cache for several sequences in one forward pass.

Every layer works on the tokens of all sequences at once; only attention, which must not mix them, goes sequence by
sequence.

Letters: P sequences; T tokens fed in all, T_p of one sequence; H key/value heads, D head size.
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
    """Cache passed to the model that writes to the caches of P sequences in one forward pass.

    Args:
        sizes: [P] tokens fed of each sequence, T_p; the input holds the sequences one after another.
        masks: [P], made by MaskBuilder.
        num_padding: padding tokens after all sequences, whose logits are not used.

    Attributes:
        sizes: [P + 1] tokens fed of each sequence, then number of padding tokens.
        states: [P] keys and values, [1, H, L_p + T_p, D] each, of the layer that wrote last.
        mask: placeholder to pass to the model as its mask, or one per kind of layer; `masks_of` maps each to P masks.
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
        """Register P masks, and return their placeholder tensor, or one placeholder per kind of layer."""
        if isinstance(masks[0], dict):  # then all are dicts: they come from one MaskBuilder
            by_kind = cast(Sequence[dict[str, torch.Tensor]], masks)
            return {kind: self._stand_in_of_kind([each[kind] for each in by_kind]) for kind in masks[0]}
        return self._stand_in_of_kind(cast(Sequence[torch.Tensor], masks))

    def _stand_in_of_kind(self, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Register P masks of one kind of layer, and return their placeholder tensor."""
        stand_in = torch.zeros((1, 1, 1, 1), dtype=masks[0].dtype, device=masks[0].device)
        self._masks[stand_in.data_ptr()] = list(masks)
        return stand_in

    def masks_of(self, stand_in: torch.Tensor) -> list[torch.Tensor]:
        """Return the P masks for which a layer received this placeholder."""
        return self._masks[stand_in.data_ptr()]


class _BatchedLayer(StandInLayer):
    """One layer of a BatchedCache."""

    def __init__(self, owner: BatchedCache, layers: Sequence[CacheLayerMixin]):
        super().__init__()
        self._owner, self._layers = owner, layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each sequence's part of the keys and values, [1, H, T, D], to its cache; return the inputs."""
        states = (each.split(self._owner.sizes, 2)[:-1] for each in (key_states, value_states))
        parts = zip(self._layers, *states, strict=True)
        self._owner.states = [layer.update(keys, values) for layer, keys, values in parts]
        return key_states, value_states

    def get_max_length(self) -> int:
        """Return the smallest capacity of the caches, in tokens."""
        return min(layer.get_max_length() for layer in self._layers)
