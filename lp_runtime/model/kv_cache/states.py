"""The cache of a sequence that is fed as chains: keys and values, and the states that recurrent layers carry.

Keys and values are cut back by a length, as in a TreeCache. A state cannot be cut back: it is saved where a chain of
guesses begins, and restored where the chain was not accepted whole. Built on the cache interface of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from lp_runtime.model.kv_cache.cache import SavedStates, TreeCache, TreeCacheLayer

if TYPE_CHECKING:
    from transformers.cache_utils import DummyLayer  # of a layer that keeps nothing; not in transformers 5.17

    AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)  # a window is written into the mask that the model makes
BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


class TreeStateLayer(LinearAttentionLayer, TreeCacheLayer):  # type: ignore[misc, override]  # as transformers' own such layers
    """A layer that has attention and a state.

    Args:
        keys_and_values: a layer of the same cache, whose length and place this one takes over.
        number_of_states: of the layer.
    """

    is_compileable = False

    def __init__(self, keys_and_values: TreeCacheLayer, number_of_states: int):
        vars(self).update(vars(keys_and_values))
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Allocate keys and values, which come by place, or a state, which comes by name: transformers' convention."""
        if args:
            TreeCacheLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget the state; keys and values are forgotten by the cache's length."""
        LinearAttentionLayer.reset(self)


def _saved(layer: AnyLayer) -> dict[str, object]:
    """Return a layer's attributes by name; tensors in dictionaries, which the layer writes in place, are copied."""
    names = vars(LinearAttentionLayer()) if isinstance(layer, TreeStateLayer) else vars(layer)
    attributes: dict[str, object] = {}
    for name in names:
        value = vars(layer)[name]
        attributes[name] = {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value
    return attributes


def _restore(layer: AnyLayer, attributes: Mapping[str, object]) -> None:
    """Make a layer what it, or another cache's layer in its place, was when it was saved."""
    live = vars(layer)
    for name, saved in attributes.items():
        if isinstance(saved, dict):
            for key, value in saved.items():
                _write(live[name], key, value)
        else:
            live[name] = saved


def _copy(value: object) -> object:
    """Return a copy of a tensor, and anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _write(live: dict[object, object], key: object, saved: object) -> None:
    """Write a saved value to its place in a layer's dictionary, into the tensor that is there if that fits."""
    now = live.get(key)
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == saved.shape:
        now.copy_(saved)
    else:
        live[key] = _copy(saved)


class StateCache(TreeCache):
    """Keys, values and states of one sequence in all layers.

    Args:
        config: the model's (text) configuration, which names the kind of each layer.
        capacity: tokens that fit: the committed ones and one step's.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int):
        kinds = DynamicCache(config=config).layers
        super().__init__(len(kinds), capacity)
        self._stateful: list[AnyLayer] = []  # layers that are more than keys and values
        for index, layer in enumerate(kinds):
            if isinstance(layer, BOTH):
                layer = TreeStateLayer(self._layers[index], layer.number_of_states)
                self._layers[index] = layer
            if type(layer) not in ATTENTION:
                self.layers[index] = layer
                self._stateful.append(layer)
        self._saved: SavedStates | None = None

    def save_states(self) -> None:
        """Save the states as they are behind the committed tokens, unless they are saved."""
        self._saved = self.states()

    def take_back(self) -> None:
        """Take back what was fed since the states were saved."""
        if self._saved is not None:
            self.restore_states(self._saved)
        self.truncate(self.length)

    def states(self) -> SavedStates:
        return self._saved or SavedStates(tuple(_saved(layer) for layer in self._stateful))

    @torch.inference_mode()  # as states are written
    def restore_states(self, states: SavedStates) -> None:
        for layer, attributes in zip(self._stateful, states.layers, strict=True):
            _restore(layer, attributes)

    def commit(self, num_tokens: int) -> None:
        """Keep all `num_tokens` tokens that were fed since the last commit: their states can be saved now."""
        super().commit(num_tokens)
        self._saved = None

    @torch.inference_mode()  # as states are written
    def clear(self) -> None:
        """Forget all tokens; the memory stays allocated."""
        super().clear()
        self._saved = None
        for layer in self._stateful:
            layer.reset()
