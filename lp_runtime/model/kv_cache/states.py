"""Cache of a sequence that is fed as chains: keys and values, and the states of recurrent layers.

Keys and values are truncated by a length, as in a TreeCache. A state cannot be truncated: it is saved before a chain of
guesses is fed, and restored if the chain was not accepted whole. Implements transformers' cache interface.
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
    from transformers.cache_utils import DummyLayer  # cache of a layer that keeps nothing; not in transformers 5.17

    AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)  # windows are applied by the model's mask
BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


class TreeStateLayer(LinearAttentionLayer, TreeCacheLayer):  # type: ignore[misc, override]  # as transformers' own such layers
    """Cache layer with keys, values and a recurrent state, in place of `keys_and_values` in a cache."""

    is_compileable = False

    def __init__(self, keys_and_values: TreeCacheLayer, number_of_states: int):
        vars(self).update(vars(keys_and_values))
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Allocate keys and values, which transformers passes by position, or a state, passed by keyword."""
        if args:
            TreeCacheLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


def _saved(layer: AnyLayer) -> dict[str, object]:
    """Return a layer's attributes by name; tensors in dictionaries, which it writes in place, are copied."""
    names = vars(LinearAttentionLayer()) if isinstance(layer, TreeStateLayer) else vars(layer)
    attributes: dict[str, object] = {}
    for name in names:
        value = vars(layer)[name]
        attributes[name] = {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value
    return attributes


def _restore(layer: AnyLayer, attributes: Mapping[str, object]) -> None:
    """Restore a layer's attributes from `_saved` of the same layer, or of that layer in another cache."""
    live = vars(layer)
    for name, saved in attributes.items():
        if isinstance(saved, dict):
            for key, value in saved.items():
                _write(live[name], key, value)
        else:
            live[name] = saved


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _write(live: dict[object, object], key: object, saved: object) -> None:
    """Write a saved value into a layer's dictionary, in place if there is a tensor of the same shape."""
    now = live.get(key)
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == saved.shape:
        now.copy_(saved)
    else:
        live[key] = _copy(saved)


class StateCache(TreeCache):
    """Keys, values and states of one sequence in all layers; `config` determines each layer's kind."""

    def __init__(self, config: PreTrainedConfig, capacity: int):
        kinds = DynamicCache(config=config).layers
        super().__init__(len(kinds), capacity)
        self._stateful: list[AnyLayer] = []  # layers with more than keys and values
        for index, layer in enumerate(kinds):
            if isinstance(layer, BOTH):
                layer = TreeStateLayer(self._layers[index], layer.number_of_states)
                self._layers[index] = layer
            if type(layer) not in ATTENTION:
                self.layers[index] = layer
                self._stateful.append(layer)
        self._saved: SavedStates | None = None
        self._initial = self.states()

    def save_states(self) -> None:
        """Save the states after the committed tokens, unless they are saved already."""
        self._saved = self.states()

    def roll_back(self) -> None:
        if self._saved is not None:
            self.restore_states(self._saved)
        self.truncate(self.length)

    def states(self) -> SavedStates:
        return self._saved or SavedStates(tuple(_saved(layer) for layer in self._stateful))

    @torch.inference_mode()  # states are inference tensors: writing them in place requires this mode
    def restore_states(self, states: SavedStates) -> None:
        for layer, attributes in zip(self._stateful, states.layers, strict=True):
            _restore(layer, attributes)

    def commit(self, num_tokens: int) -> None:
        """Commit all `num_tokens` tokens fed since the last commit; states saved before them become invalid."""
        super().commit(num_tokens)
        self._saved = None

    def clear(self) -> None:
        """Discard all tokens and states; only the memory of TreeCacheLayers stays allocated."""
        super().clear()
        self._saved = None
        # Not `layer.reset()`: before transformers 5.18 it zeroes keys in place instead of removing them.
        self.restore_states(self._initial)
