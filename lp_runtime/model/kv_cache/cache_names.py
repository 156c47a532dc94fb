"""Keyword names of transformers' caches.

A model's forward calls its cache `cache` since transformers 5.24, and `past_key_values` before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

KEYS_AND_VALUES = ("past_key_values", "cache")
CACHE_NAMES = (*KEYS_AND_VALUES, "cache_params")  # the last one: models with states only, before transformers 5.24


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
