"""The texts that a model has been fed: each has a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.cuda_graph import CudaGraphRunner
from lp_runtime.model.kv_cache.cache import TreeCache


@dataclass
class CacheSlot:
    """A text that a model has been fed.

    Attributes:
        cache: its keys and values; None before anything was fed.
        tokens: whose keys and values these are.
        num_prefilled: of them, fed as a prompt.
        fixed: passes of fixed sizes over this cache, where there are.
        drawn: what the last pass drew on its own, see CudaGraphRunner.forward; None if it did not.
    """

    cache: TreeCache | None = None
    tokens: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    fixed: CudaGraphRunner | None = None
    drawn: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that it has memory for."""
        return 0 if self.cache is None else self.cache.capacity


class Fed(NamedTuple):
    """A text's part in a step: see ModelRunner.forward."""

    text: CacheSlot
    tree: TokenTree
    nodes: Sequence[int]
    wanted: Sequence[int]


class SlotPool:
    """Texts that nobody is decoding: their memory, and what they hold, may be of use.

    Args:
        first: one to begin with.
    """

    def __init__(self, first: CacheSlot):
        self._texts = [first]

    def take(self, capacity: int, tokens: Sequence[int] = ()) -> CacheSlot:
        """One to be used: of those that have room, the one whose passes of fixed sizes are made, else the smallest. If
        none has, the largest; all others are freed then.

        Args:
            capacity: tokens that it needs room for.
            tokens: a text that is taken up: if any holds the beginning of it, the one that holds most.
        """
        wanted = list(tokens)

        def num_known(text: CacheSlot) -> int:
            return len(os.path.commonprefix([text.tokens, wanted])) if wanted else 0

        def worth(text: CacheSlot) -> tuple:
            has_room = text.capacity >= capacity
            return num_known(text), has_room, text.fixed is not None, -text.capacity if has_room else text.capacity

        best = max(self._texts, key=worth, default=None)
        if best is None:
            return CacheSlot()
        self._texts = [text for text in self._texts if text is not best]
        if best.capacity < capacity:
            self._texts = []
        return best

    def give(self, text: CacheSlot) -> None:
        """One more that nobody is decoding. Passes of fixed sizes are kept of one of them only."""
        if text.fixed is not None:
            for other in self._texts:
                other.fixed = None
        self._texts.append(text)
