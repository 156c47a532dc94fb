"""The texts that a model has been fed: each has a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from lp_runtime.model.cache import TreeCache
from lp_runtime.model.fixed_forward import FixedForward


@dataclass
class CachedText:
    """A text that a model has been fed.

    Attributes:
        cache: its keys and values; None before anything was fed.
        tokens: whose keys and values these are.
        num_prefilled: of them, fed as a prompt.
        fixed: passes of fixed sizes over this cache, where there are.
    """

    cache: TreeCache | None = None
    tokens: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    fixed: FixedForward | None = None

    @property
    def capacity(self) -> int:
        """Tokens that it has memory for."""
        return 0 if self.cache is None else self.cache.capacity


class IdleTexts:
    """Texts that nobody is decoding: their memory, and what they hold, may be of use.

    Args:
        first: one to begin with.
    """

    def __init__(self, first: CachedText):
        self._texts = [first]

    def take(self, tokens: Sequence[int], capacity: int) -> CachedText:
        """The one that begins most like `tokens`; of those alike, the largest. If it must grow to have room for
        `capacity` tokens, all others are freed."""
        if not self._texts:
            return CachedText()

        wanted = list(tokens)

        def worth(text: CachedText) -> tuple[int, int]:
            return len(os.path.commonprefix([text.tokens, wanted])), text.capacity

        best = max(self._texts, key=worth)
        self._texts = [text for text in self._texts if text is not best]
        if best.capacity < capacity:
            self._texts = []
        return best

    def give(self, text: CachedText) -> None:
        """One more that nobody is decoding."""
        self._texts.append(text)
