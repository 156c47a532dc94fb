"""KV cache of one sequence: preallocated, holds committed tokens, truncated in O(1).

A forward pass writes its keys and values after the committed ones; committing only changes the length. Implements
transformers' cache interface. Letters: T tokens fed, H key/value heads, D head size. Keys and values of a layer are [1,
H, T, D] each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

LayerStates = tuple[int, torch.Tensor, torch.Tensor]  # index of a layer, its keys and values, [1, H, T, D] each


@dataclass(frozen=True)
class SavedStates:
    """Immutable snapshot of the states that recurrent layers carry at one point of a sequence."""

    layers: tuple[Mapping[str, object], ...]  # attributes of each layer by name; tensors in dictionaries are copies

    @property
    def num_bytes(self) -> int:
        values = [value for layer in self.layers for value in layer.values()]
        tensors = [each for value in values for each in (value.values() if isinstance(value, dict) else (value,))]
        return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))


class _Length:
    """Number of tokens in a cache, and the addresses of its tensors; shared by all its layers."""

    __slots__ = ("value", "written", "addresses")

    def __init__(self, num_layers: int) -> None:
        self.value = 0  # committed tokens
        self.written = 0  # tokens after the committed ones that the next pass must not overwrite
        # [layers, 2] int64, addresses of each layer's keys and values; 0 before they are allocated.
        self.addresses = np.zeros((num_layers, 2), np.int64)

    @property
    def place(self) -> int:
        return self.value + self.written


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, H, capacity, D] each; all after the committed length is scratch."""

    is_sliding = False  # sliding windows are applied by the step's mask
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, capacity: int, length: _Length, index: int):
        super().__init__()
        self.capacity = capacity
        self.arrays: tuple[np.ndarray, np.ndarray] | None = None  # views of keys and values, on a CPU in float32
        self._length, self._index = length, index  # `length` is shared by all layers

    def resize(self, capacity: int) -> None:
        """Reallocate for `capacity` tokens, and copy the committed ones; unchanged if memory runs out."""
        before, self.capacity = self.capacity, capacity
        if self.is_initialized:
            length, old = self._length.value, (self.keys, self.values)
            try:
                self.lazy_initialization(*old)
            except BaseException:
                self.capacity = before
                raise
            for new, states in zip((self.keys, self.values), old, strict=True):
                new[..., :length, :] = states[..., :length, :]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the layer's tensors like the given ones, except for their length."""

        def empty(like: torch.Tensor) -> torch.Tensor:
            return like.new_empty((*like.shape[:-2], self.capacity, like.shape[-1]))

        self.keys, self.values = empty(key_states), empty(value_states)
        has_arrays = self.keys.is_cpu and self.keys.dtype is torch.float32
        self.arrays = (self.keys.numpy(), self.values.numpy()) if has_arrays else None
        self._length.addresses[self._index] = self.keys.data_ptr(), self.values.data_ptr()
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of T new tokens; return views of all up to and including the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self._length.place
        end = start + key_states.shape[-2]
        self.keys[..., start:end, :] = key_states
        self.values[..., start:end, :] = value_states
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys that `query_length` new tokens attend to, index of the first key)."""
        return self._length.value + query_length, 0

    def get_seq_length(self) -> int:
        return self._length.value

    def get_max_length(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """Keys and values of one sequence in all layers; `capacity`, in tokens, includes those of one step."""

    def __init__(self, num_layers: int, capacity: int):
        self._length = _Length(num_layers)
        self.capacity = capacity
        self._layers = [TreeCacheLayer(capacity, self._length, index) for index in range(num_layers)]
        super().__init__(layers=list(self._layers))

    @property
    def length(self) -> int:
        return self._length.value

    @property
    def place(self) -> int:
        return self._length.place

    @property
    def addresses(self) -> np.ndarray:
        """[layers, 2] int64, addresses of each layer's keys and values; 0 for a layer that was not used yet."""
        return self._length.addresses

    def arrays(self, layer: int, num_heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return numpy views of a layer's keys and values, allocated if needed; only on a CPU in float32."""
        tree_layer = self._layers[layer]
        if not tree_layer.is_initialized:
            example = torch.empty(1, num_heads, 0, size, dtype=torch.float32)
            tree_layer.lazy_initialization(example, example)
        assert tree_layer.arrays is not None
        return tree_layer.arrays

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that have been used."""
        tensors = [each for layer in self._layers if layer.is_initialized for each in (layer.keys, layer.values)]
        return sum(each.numel() * each.element_size() for each in tensors) // self.capacity

    def tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole keys and values of a layer that has been used, up to its capacity."""
        return self._layers[layer].keys, self._layers[layer].values

    def committed(self) -> Iterator[LayerStates]:
        """Yield (index, keys, values) of each used layer: views of the committed tokens."""
        for index, layer in enumerate(self._layers):
            if layer.is_initialized:
                yield index, layer.keys[:, :, : self.length], layer.values[:, :, : self.length]

    def restore(self, states: Sequence[LayerStates], num_tokens: int) -> None:
        """Copy and commit the first `num_tokens` tokens that `committed` yielded for another cache."""
        for layer, keys, values in states:
            self._layers[layer].update(keys[:, :, :num_tokens], values[:, :, :num_tokens])
        self.commit(num_tokens)

    def states(self) -> SavedStates | None:
        """Return the recurrent states after the committed tokens; None if the cache has no states."""
        return None

    def restore_states(self, states: SavedStates) -> None:
        """Restore recurrent states that `states` returned for a cache of the same model and the same tokens."""
        raise NotImplementedError("this cache holds only keys and values")

    def keep_writing(self, num_tokens: int) -> None:
        """Protect the next `num_tokens` uncommitted tokens until the next `commit` or `truncate`."""
        self._length.written += num_tokens

    def commit(self, num_tokens: int) -> None:
        """Commit the first `num_tokens` of the tokens written since the last commit; discard the others."""
        assert self._length.value + num_tokens <= self.capacity
        self._length.value += num_tokens
        self._length.written = 0

    def truncate(self, length: int) -> None:
        assert length <= self._length.value
        self._length.value = length
        self._length.written = 0

    def place_at(self, length: int, written: int) -> None:
        """Copy the committed and written lengths of another shard's cache; this shard holds the same tokens."""
        self._length.value, self._length.written = length, written

    def repeat_first(self, length: int) -> None:
        """Fill the cache with `length` committed tokens that all have the keys and values of the first one."""
        for layer in self._layers:
            if layer.is_initialized:
                for states in (layer.keys, layer.values):
                    states[..., 1:length, :] = states[..., :1, :]
        self.place_at(length, 0)

    def grow(self, capacity: int) -> None:
        """Make `capacity` tokens fit into all layers; unchanged if memory runs out."""
        try:
            for layer in self._layers:
                layer.resize(capacity)
        except BaseException:
            for layer in self._layers:  # kernels read all layers with one capacity
                if layer.capacity > self.capacity:
                    layer.resize(self.capacity)  # fits: the layer that grew last has freed as much
            raise
        self.capacity = capacity

    def clear(self) -> None:
        """Discard all tokens; the memory stays allocated."""
        self.truncate(0)
