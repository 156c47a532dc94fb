"""The key/value cache of one replica: preallocated, holds committed tokens, is cut back in O(1).

A forward pass writes its keys and values behind the committed ones; committing moves the length, nothing else.
Built on the cache interface of transformers. Letters: H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _Length:
    """The committed length, and how much is written behind it already, shared by all layers of a cache; or where to
    write, on the device."""

    __slots__ = ("value", "written", "slots")

    def __init__(self) -> None:
        self.value = 0
        self.written = 0
        self.slots: torch.Tensor | None = None

    @property
    def place(self) -> int:
        return self.value + self.written


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [1, H, capacity, D] each. What lies behind the committed length is scratch."""

    is_sliding = False  # a sliding window is written into the step's mask

    def __init__(self, capacity: int, length: _Length):
        super().__init__()
        self.capacity = capacity
        self._length = length

    def grow(self, capacity: int) -> None:
        """Make room for more tokens; the committed ones are copied."""
        self.capacity = capacity
        if self.is_initialized:
            length, old = self._length.value, (self.keys, self.values)
            self.lazy_initialization(*old)
            for new, before in zip((self.keys, self.values), old, strict=True):
                new[..., :length, :] = before[..., :length, :]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty(like: torch.Tensor) -> torch.Tensor:
            return like.new_empty((*like.shape[:-2], self.capacity, like.shape[-1]))

        self.keys, self.values = empty(key_states), empty(value_states)
        is_read = self.keys.is_cpu and self.keys.dtype is torch.float32
        self.arrays = (self.keys.numpy(), self.values.numpy()) if is_read else None
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T new tokens' states behind what is there; returns views of all of it, [1, H, length, D].

        While slots are given, to these; returns the whole memory, [1, H, capacity, D].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._length.slots is not None:
            self.keys.index_copy_(2, self._length.slots, key_states)
            self.values.index_copy_(2, self._length.slots, value_states)
            return self.keys, self.values
        start = self._length.place
        end = start + key_states.shape[-2]
        self.keys[..., start:end, :] = key_states
        self.values[..., start:end, :] = value_states
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length.value + query_length, 0

    def get_seq_length(self) -> int:
        return self._length.value

    def get_max_length(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """The cache of all layers.

    Args:
        num_layers: decoder layers of the model.
        capacity: tokens it can hold: the committed ones and one step's.
    """

    def __init__(self, num_layers: int, capacity: int):
        self._length = _Length()
        self.capacity = capacity
        super().__init__(layers=[TreeCacheLayer(capacity, self._length) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length.value

    @property
    def place(self) -> int:
        """Where the next token is written."""
        return self._length.place

    def arrays(self, layer: int, num_heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """`memory` of a layer on a CPU, in float32, for code that is no tensors'; made if need be, for H and D."""
        if not self.layers[layer].is_initialized:
            nothing = torch.empty(1, num_heads, 0, size, dtype=torch.float32)
            self.layers[layer].lazy_initialization(nothing, nothing)
        return self.layers[layer].arrays

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, as far as they have been used."""
        tensors = [each for layer in self.layers if layer.is_initialized for each in (layer.keys, layer.values)]
        return sum(each.numel() * each.element_size() for each in tensors) // self.capacity

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, [1, H, capacity, D] each; it must have been used."""
        return self.layers[layer].keys, self.layers[layer].values

    @contextmanager
    def writing_at(self, slots: torch.Tensor) -> Iterator[None]:
        """Write the tokens of a forward pass to slots, [T] int64, that are known on the device only."""
        self._length.slots = slots
        try:
            yield
        finally:
            self._length.slots = None

    def keep_writing(self, num_tokens: int) -> None:
        """A forward pass has written this many; the next one writes behind them. Until the next commit."""
        self._length.written += num_tokens

    def commit(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of those that have been written since the last commit; forget the others."""
        assert self._length.value + num_tokens <= self.capacity
        self._length.value += num_tokens
        self._length.written = 0

    def truncate(self, length: int) -> None:
        """Keep the first committed tokens; forget the others."""
        assert length <= self._length.value
        self._length.value = length
        self._length.written = 0

    def grow(self, capacity: int) -> None:
        """Make room for more tokens; the committed ones are copied, layer by layer."""
        self.capacity = capacity
        for layer in self.layers:
            layer.grow(capacity)

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self.truncate(0)
