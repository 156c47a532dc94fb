"""By which name a model takes its KV cache: `cache` since transformers 5.24, `past_key_values` before."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import Cache, PreTrainedModel

KEYS_AND_VALUES = ("past_key_values", "cache")
CACHE_NAMES = (*KEYS_AND_VALUES, "cache_params")  # the last one of models that carry a state alone, before 5.24


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the keyword by which a model's forward takes a cache; None if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def given_cache(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (keyword, cache) of the KV cache among keyword arguments; the cache is None without any."""
    for name in KEYS_AND_VALUES:
        if arguments.get(name) is not None:
            return name, arguments[name]
    return KEYS_AND_VALUES[0], None


def num_cached(cache: Cache | None) -> int:
    """Return how many tokens' keys a cache holds; 0 for None, and for a cache of states alone."""
    try:
        return 0 if cache is None else cache.get_seq_length()
    except ValueError:  # transformers: of a cache without a layer of keys
        return 0
