"""Reads arguments of transformers' `generate` that it does not pass to a `custom_generate` callable.

`GenerationMixin._extract_generation_mode_kwargs` (transformers 5.x) hands a callable its own keywords alone, taken from
`generate`'s **kwargs. `streamer` and `assistant_model` are named parameters of `generate` and never among those, so no
parameter of the callable, whatever its name, receives them. Neither may be left alone. `generate` has put the prompt
into the streamer by the time it calls: a streamer that is never ended leaves its reader waiting forever. And an
assistant model would be ignored in silence, where it must be refused. What is left is the stack: the frame of the call
of `generate` that called us holds both.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lp_runtime.model.kv_cache.cache_names import given_cache

MAX_FRAMES = 6  # between us and `generate`: our callers, and decorators of the callable


class GenerateArguments(NamedTuple):
    """What `generate` was called with and keeps to itself.

    Attributes:
        streamer: gets new tokens; None if the caller gave none.
        assistant_model: draft model; None if the caller gave none.
        cache: the caller's own; None if `generate` has made the cache.
    """

    streamer: BaseStreamer | None = None
    assistant_model: PreTrainedModel | None = None
    cache: Cache | None = None


def arguments_of_generate() -> GenerateArguments:
    """Return the arguments of the call of `generate` that is on the stack; none if it is not called by `generate`."""
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(MAX_FRAMES):
        frame = frame and frame.f_back
        if frame and frame.f_code is generate:
            given = frame.f_locals
            _, cache = given_cache(given.get("kwargs") or {})
            return GenerateArguments(given.get("streamer"), given.get("assistant_model"), cache)
    return GenerateArguments()
