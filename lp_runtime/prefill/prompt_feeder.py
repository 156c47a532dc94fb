"""Feeds a prompt in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner


class PromptFeeder:
    """Feeds the chunks of a prompt to a slot, which is begun and holds what precedes the prompt.

    Subclasses also keep something about each token, for which they may need smaller chunks.
    """

    def __init__(self, model: ModelRunner, slot: CacheSlot):
        self._model, self._slot = model, slot

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk at most."""
        return self._model.prefill_chunk

    def cut(self, prompt: Sequence[int], point: int) -> list[Sequence[int]]:
        """Cut the prompt into chunks; one of them ends after `point` tokens, if not 0."""
        parts = prompt[:point], prompt[point:]
        return [chunk for part in parts for chunk in self._model.cut(part, self.chunk_tokens)]

    def feed(self, chunk: Sequence[int]) -> torch.Tensor:
        """Feed and commit the prompt's next chunk; return the [1, V] float32 logits of its last token."""
        return self._model.feed_prompt(self._slot, chunk)
