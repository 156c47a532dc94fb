"""KV caches passed to the model in place of those of several sequences, in one forward pass.

Every layer works on the tokens of all sequences at once; only attention, which must not mix them, goes sequence by
sequence. A captured pass must not contain the address of any cache. So it writes and attends to keys and values
through a table of addresses that is part of each step's inputs (model/forward/pass_inputs.py,
kernels/triton_attention.py).

Letters: P sequences; T tokens fed in all, T_p of one sequence; B tokens of a pass of a fixed size, padding included; H
key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lp_runtime.kernels.types import Rotation
from lp_runtime.model.attention.mask import LayerMasks
from lp_runtime.model.kv_cache.cache import TreeCache, TreeCacheLayer


class _StandInCache(Cache):
    """Cache of several sequences. transformers never asks for its length: masks and positions are passed."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[_StandInLayer(self, index) for index in range(num_layers)])

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return them, because attention reads their shapes."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (tokens fed, 0), from which transformers would make a mask if none were passed."""
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _StandInLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, owner: _StandInCache, index: int):
        super().__init__()
        self._owner, self._index = owner, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate nothing: the layers of the sequences' caches allocate their tensors."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return what the layer computes with."""
        return self._owner.write(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        """Return -1, transformers' value for no limit."""
        return -1


class BatchedCache(_StandInCache):
    """Cache passed to the model that writes to the caches of P sequences, one after another in the input."""

    def __init__(
        self,
        caches: Sequence[TreeCache],
        sizes: Sequence[int],
        masks: Sequence[LayerMasks],
        num_padding: int = 0,
        has_latents: bool = False,
    ):
        self.sizes = [*sizes, num_padding]  # [P + 1] tokens fed of each sequence, then number of padding tokens
        # [P + 1] number of keys of each sequence, then of padding tokens, if the layer that wrote last computes its
        # keys from what is cached (latent attention): it then gets those of all sequences, one after another.
        self.joined: list[int] | None = None
        # [P] keys and values, [1, H, L_p + T_p, D] each, of the layer that wrote last.
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_latents = has_latents
        self._caches = caches
        self._masks: dict[int, list[torch.Tensor]] = {}
        # Placeholder to pass to the model as its mask, or one per kind of layer; `masks_of` maps each to P masks.
        self.mask = self._stand_in(masks)
        super().__init__(len(caches[0].layers))

    def _stand_in(self, masks: Sequence[LayerMasks]) -> LayerMasks:
        if isinstance(masks[0], dict):  # then all are dicts: they come from one MaskBuilder
            by_kind = cast(Sequence[dict[str, torch.Tensor]], masks)
            return {kind: self._stand_in_of_kind([each[kind] for each in by_kind]) for kind in masks[0]}
        return self._stand_in_of_kind(cast(Sequence[torch.Tensor], masks))

    def _stand_in_of_kind(self, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        stand_in = torch.zeros((1, 1, 1, 1), dtype=masks[0].dtype, device=masks[0].device)
        self._masks[stand_in.data_ptr()] = list(masks)
        return stand_in

    def masks_of(self, stand_in: torch.Tensor) -> list[torch.Tensor]:
        """Return the P masks for which a layer received this placeholder."""
        return self._masks[stand_in.data_ptr()]

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (each.split(self.sizes, 2) for each in (key, value))
        parts = zip(self._caches, keys[:-1], values[:-1], strict=True)
        self.states = [cast(TreeCacheLayer, cache.layers[layer]).update(*states) for cache, *states in parts]
        if not self._has_latents:
            return key, value
        whole = [*self.states, (keys[-1], values[-1])]
        self.joined = [keys.shape[2] for keys, _ in whole]
        key, value = (torch.cat(each, 2) for each in zip(*whole, strict=True))
        return key, value


class DeviceInputs(NamedTuple):
    """Inputs of attention in a fixed-size pass, on the device; all int64."""

    positions: torch.Tensor  # [B] absolute positions
    owners: torch.Tensor  # [B] each token's row in `table`
    table: torch.Tensor  # [sequences + 1, 4 + 2 layers], see kernels/triton_attention.py
    # [B, W] bit mask: which fed tokens of its sequence each token sees. With exactness=strict: the tokens' paths, see
    # kernels/triton_strict.py.
    words: torch.Tensor


class DeviceCache(_StandInCache):
    """Cache passed to the model that writes to the caches of all sequences of a fixed-size pass."""

    def __init__(
        self, num_layers: int, inputs: DeviceInputs, kernels: Any, num_processors: int, is_strict: bool = False
    ):
        self._inputs = inputs
        self._kernels = kernels
        self._num_processors = num_processors
        self._is_strict = is_strict
        self._layer = 0  # the layer that wrote last
        super().__init__(num_layers)

    def rotate_and_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor],  # cosines and sines
        layer: int,
        rotation: Rotation,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys, and write keys and values; shapes are those of kernels/triton_cache.py.

        `norms` are the weights and the epsilon of the RMS norms that queries and keys pass first, if there are any.
        """
        self._layer = layer
        norms_or_none = (None, None, 0.0) if norms is None else norms
        return self._kernels.rotate_and_write(
            query, key, value, *factors, self._inputs.owners, self._inputs.table, layer, *norms_or_none, rotation
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._layer = layer
        if key.stride(3) != 1 or value.stride(3) != 1:
            key, value = key.contiguous(), value.contiguous()
        self._kernels.write(key, value, self._inputs.owners, self._inputs.table, layer)
        return key, value

    def attend(
        self, query: torch.Tensor, num_heads: int, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to committed tokens and ancestors in the layer that wrote last; return [1, B, g H, D].

        `query` is [1, g H, B, D]. `mask`, [1, 1, 1, B] int64, has the lowest position that each token may see.
        """
        positions, owners, table, words = self._inputs
        query = query if query.stride(3) == 1 else query.contiguous()
        lowest, layer = mask[0, 0, 0], self._layer
        if self._is_strict:
            return self._kernels.attend_strictly(
                query, num_heads, lowest, positions, words, owners, table, layer, scale, sinks
            )
        return self._kernels.attend(
            query, num_heads, lowest, positions, words, table, layer, scale, self._num_processors, sinks
        )
