"""Access to arguments of `generate` that it does not pass to a `custom_generate` callable.

`GenerationMixin._extract_generation_mode_kwargs` (transformers 5.x) only passes a callable those of its keywords that
are in `generate`'s **kwargs. `streamer` and `assistant_model` are named parameters of `generate`, so the callable never
receives them. Neither can be ignored: `generate` has already put the prompt into the streamer, whose reader would wait
forever if the streamer were never ended, and an assistant model must be refused instead of silently ignored. So we read
both from the stack frame of the call of `generate`.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lp_runtime.model.kv_cache.cache_names import given_cache

MAX_FRAMES = 6  # between this module and `generate`: the callable and its decorators


class GenerateArguments(NamedTuple):
    """Arguments of a call of `generate` that it does not pass on; None if the caller gave none."""

    streamer: BaseStreamer | None = None
    assistant_model: PreTrainedModel | None = None
    cache: Cache | None = None


def arguments_of_generate() -> GenerateArguments:
    """Return the arguments of the call of `generate` on the stack; all None if there is no such call."""
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(MAX_FRAMES):
        frame = frame and frame.f_back
        if frame and frame.f_code is generate:
            given = frame.f_locals
            _, cache = given_cache(given.get("kwargs") or {})
            return GenerateArguments(given.get("streamer"), given.get("assistant_model"), cache)
    return GenerateArguments()
