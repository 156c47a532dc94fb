"""The cache that a caller of `generate` passes, or receives in the output: whether we can fill it, and filling it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from lp_runtime.errors import ConfigError
from lp_runtime.model.kv_cache.cache import LayerStates, TreeCache
from lp_runtime.model.kv_cache.cache_names import given_cache
from lp_runtime.model.kv_cache.states import ATTENTION, BOTH

RECURRENT = (LinearAttentionLayer, *BOTH)  # like ATTENTION, they hold nothing but keys, values and states


def holds_tokens(cache: Cache | None) -> bool:
    """Whether a cache holds keys, values or states of any token; False for None."""
    if cache is None:
        return False
    try:
        if cache.get_seq_length() > 0:
            return True
    except ValueError:  # transformers raises this for a cache without attention layers
        pass
    stateful = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return any(any(layer.has_previous_state.values()) for layer in stateful)


def why_not_filled(config: PreTrainedConfig, cache: Cache) -> str | None:
    """Return why an empty cache cannot hold a model's keys, values and recurrent states; None if it can."""
    needed = DynamicCache(config=config.get_text_config(decoder=True)).layers
    layers = [*cache.layers, *[None] * len(needed)]
    for need, layer in zip(needed, layers, strict=False):
        keeps_something = isinstance(need, CacheLayerMixin | LinearAttentionCacheLayerMixin)
        if keeps_something and type(need) not in (*ATTENTION, *RECURRENT):
            return f"must be left out; a {type(need).__name__} holds more than keys, values and states"
        if isinstance(need, RECURRENT) and not isinstance(layer, LinearAttentionCacheLayerMixin):
            return "must be a DynamicCache(config=model.config); layers of the model carry states"
    return None


def cache_to_fill(config: PreTrainedConfig, arguments: Mapping[str, Any], is_own: bool) -> Cache | None:
    """Return the empty cache to fill among the forward's keyword arguments; None if there is none.

    A cache that we cannot fill is refused if the caller passed it (`is_own`), and ignored if `generate` made it.
    """
    name, cache = given_cache(arguments)
    reason = None if cache is None else why_not_filled(config, cache)
    if reason is not None and is_own:
        raise ConfigError(f"{name}: {reason}")
    return cache if reason is None else None


@dataclass(frozen=True)
class CacheCopy:
    """Copy of one sequence's cache: keys and values of its committed tokens, and the states after them."""

    num_tokens: int
    attention: tuple[LayerStates, ...]  # (index, keys, values) of each layer that has keys
    # (index of the layer, index of the state in the layer, state [1, ...])
    conv: tuple[tuple[int, int, torch.Tensor], ...]
    recurrent: tuple[tuple[int, int, torch.Tensor], ...]

    @staticmethod
    def of(cache: TreeCache) -> CacheCopy:
        stateful = [
            (index, layer)
            for index, layer in enumerate(cache.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        ]

        def copies(name: str) -> tuple[tuple[int, int, torch.Tensor], ...]:
            states = [
                (index, which, state) for index, layer in stateful for which, state in getattr(layer, name).items()
            ]
            return tuple((index, which, state.clone()) for index, which, state in states if state is not None)

        attention = tuple((index, keys.clone(), values.clone()) for index, keys, values in cache.committed())
        return CacheCopy(cache.length, attention, copies("conv_states"), copies("recurrent_states"))


def fill_cache(cache: Cache, rows: Sequence[CacheCopy], places: Sequence[torch.Tensor]) -> None:
    """Write the caches of a batch's sequences into one empty cache of transformers.

    For each row of the batch, `places` has the column of each of its tokens, [tokens] int64; other columns become zero.
    """
    longest = max(int(place[-1]) for place in places) + 1
    for layers in zip(*(row.attention for row in rows), strict=True):
        keys, values = (
            torch.cat([_spread(layer[part], place, longest) for layer, place in zip(layers, places, strict=True)])
            for part in (1, 2)
        )
        cache.update(keys, values, layers[0][0])
    for states in zip(*(row.conv for row in rows), strict=True):
        cache.update_conv_state(torch.cat([state for _, _, state in states]), states[0][0], state_idx=states[0][1])
    for states in zip(*(row.recurrent for row in rows), strict=True):
        cache.update_recurrent_state(torch.cat([state for _, _, state in states]), states[0][0], state_idx=states[0][1])


def _spread(states: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
    """Scatter states to `places` of a zero tensor with room for `length` tokens."""
    spread = states.new_zeros((*states.shape[:2], length, states.shape[3]))
    spread[:, :, places] = states
    return spread
