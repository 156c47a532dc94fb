"""The KV caches of the sequences of a pass of a fixed size: which they are, only the device knows.

A captured pass must not contain the address of any cache. So keys and values are written, and attended to, through a
table of addresses that each step's inputs bring along (model/forward/pass_inputs.py, kernels/triton_attention.py).

Letters: B tokens of a pass, padding included; H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lp_runtime.model.kv_cache.stand_in import StandInCache, StandInLayer


class DeviceInputs(NamedTuple):
    """What a pass of a fixed size reads on the device beside token ids and positions; all int64.

    Attributes:
        positions: [B] absolute positions.
        owners: [B] row of `table` of each token.
        table: [sequences + 1, 4 + 2 layers], as kernels/triton_attention.py describes it.
        words: [B, W] bits: which tokens of its own sequence each token sees. With exactness=strict the paths of the
            tokens, as kernels/triton_strict.py describes them.
    """

    positions: torch.Tensor
    owners: torch.Tensor
    table: torch.Tensor
    words: torch.Tensor


class DeviceCache(StandInCache):
    """Stands for the caches of all sequences of a pass of a fixed size.

    Args:
        num_layers: decoder layers of the model.
        inputs: where the pass's inputs are on the device.
        kernels: the module kernels/triton_gpu.py.
        num_processors: multiprocessors of the device.
        is_strict: whether attention is that of exactness=strict.
    """

    def __init__(
        self, num_layers: int, inputs: DeviceInputs, kernels: Any, num_processors: int, is_strict: bool = False
    ):
        self._inputs, self._kernels, self._num_processors = inputs, kernels, num_processors
        self._is_strict = is_strict
        self._layer = 0  # that wrote last
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
        """Rotate queries and keys, and write keys and values into the sequences' caches.

        Args:
            query: [1, B, g H, D].
            key: [1, B, H, D].
            value: [1, B, H, D].
            cos: [1, B, D].
            sin: [1, B, D].
            layer: index of the layer.

        Returns:
            [1, B, g H, D] rotated queries.
        """
        self._layer = layer
        return self._kernels.rotate_and_write(
            query, key, value, cos, sin, self._inputs.owners, self._inputs.table, layer
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Write keys and values, [1, H, B, D] each, into the sequences' caches, at a layer."""
        self._layer = layer
        if key.stride(3) != 1 or value.stride(3) != 1:
            key, value = key.contiguous(), value.contiguous()
        self._kernels.write(key, value, self._inputs.owners, self._inputs.table, layer)

    def attend(
        self, query: torch.Tensor, num_heads: int, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to committed tokens and ancestors in the layer that wrote last.

        Args:
            query: [1, g H, B, D].
            num_heads: H.
            mask: [1, 1, 1, B] int64, the lowest position that each token may see.
            scale: factor of the scores.
            sinks: [g H] attention sinks; None for none.

        Returns:
            [1, B, g H, D]
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
    """One layer of the sequences' caches."""

    def __init__(self, owner: DeviceCache, index: int):
        super().__init__()
        self._owner, self._index = owner, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, [1, H, B, D] each; return both, of which attention reads the shapes."""
        self._owner.write(key_states, value_states, self._index)
        return key_states, value_states

    def get_max_length(self) -> int:
        """Return -1: there is no limit that the host knows."""
        return -1
