"""KV caches of the sequences in a fixed-size pass, reached through a table of addresses on the device.

A captured pass must not contain the address of any cache. So keys and values are written and attended to through a
table of addresses that is part of each step's inputs (model/forward/pass_inputs.py, kernels/triton_attention.py).

Letters: B tokens of a pass, padding included; H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lp_runtime.model.kv_cache.stand_in import StandInCache, StandInLayer


class DeviceInputs(NamedTuple):
    """Inputs of attention in a fixed-size pass, on the device; all int64.

    Attributes:
        positions: [B] absolute positions.
        owners: [B] each token's row in `table`.
        table: [sequences + 1, 4 + 2 layers], see kernels/triton_attention.py.
        words: [B, W] bit mask: which fed tokens of its sequence each token sees. With exactness=strict: the tokens'
            paths, see kernels/triton_strict.py.
    """

    positions: torch.Tensor
    owners: torch.Tensor
    table: torch.Tensor
    words: torch.Tensor


class DeviceCache(StandInCache):
    """Cache passed to the model that writes to the caches of all sequences of a fixed-size pass."""

    def __init__(
        self, num_layers: int, inputs: DeviceInputs, kernels: Any, num_processors: int, is_strict: bool = False
    ):
        self._inputs = inputs
        self._kernels = kernels
        self._num_processors = num_processors
        self._is_strict = is_strict
        self._layer = 0  # the layer that wrote last
        super().__init__(layers=[_DeviceLayer(self, index) for index in range(num_layers)])

    def rotate_and_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Rotate queries and keys, write keys and values to the sequences' caches, and return the queries.

        Queries are [1, B, g H, D], keys and values [1, B, H, D], cos and sin [1, B, D].
        """
        self._layer = layer
        return self._kernels.rotate_and_write(
            query, key, value, cos, sin, self._inputs.owners, self._inputs.table, layer
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Write keys and values of a layer, [1, H, B, D] each, to the sequences' caches."""
        self._layer = layer
        if key.stride(3) != 1 or value.stride(3) != 1:
            key, value = key.contiguous(), value.contiguous()
        self._kernels.write(key, value, self._inputs.owners, self._inputs.table, layer)

    def attend(
        self, query: torch.Tensor, num_heads: int, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to committed tokens and ancestors in the layer that wrote last; return [1, B, g H, D].

        `query` is [1, g H, B, D], `num_heads` H, and `sinks` [g H], or None for none. `mask`, [1, 1, 1, B] int64, has
        the lowest position that each token may see.
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


class _DeviceLayer(StandInLayer):
    """One layer of a DeviceCache."""

    def __init__(self, owner: DeviceCache, index: int):
        super().__init__()
        self._owner, self._index = owner, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, [1, H, B, D] each; return them, because attention reads their shapes."""
        self._owner.write(key_states, value_states, self._index)
        return key_states, value_states

    def get_max_length(self) -> int:
        """Return -1, transformers' value for no limit: the host does not know the capacities."""
        return -1
