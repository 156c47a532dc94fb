"""transformers caches that a caller passes or receives: keyword names, and whether we can fill them.

A model's forward calls its cache `cache` since transformers 5.24, and `past_key_values` before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from lp_runtime.errors import ConfigError
from lp_runtime.model.kv_cache.states import ATTENTION, BOTH

KEYS_AND_VALUES = ("past_key_values", "cache")
CACHE_NAMES = (*KEYS_AND_VALUES, "cache_params")  # the last one: models with states only, before transformers 5.24
RECURRENT = (
    LinearAttentionLayer,
    *BOTH,
)  # these layers, like those of ATTENTION, hold nothing but keys, values and states


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the keyword by which a model's forward accepts a cache; None if it accepts none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def given_cache(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (keyword, cache) of the cache among keyword arguments; the cache is None if there is none."""
    for name in CACHE_NAMES:
        if arguments.get(name) is not None:
            return name, arguments[name]
    return KEYS_AND_VALUES[0], None


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
