"""At which length of a text a model's rotary factors change, and what follows for keys that are kept.

Some rotary embeddings (transformers' "dynamic" and "longrope") have other factors beyond a length. What counts is the
longest position of a pass. `generate` feeds the prompt in one pass and then one token at a time, and keys stay as they
were rotated: so the token at position p has the factors of length

    L(p) = max(P, p + 1), with P tokens of the prompt.

Some types re-feed: with the first token beyond the threshold `generate` drops the keys and feeds all of the text in one
pass. From then on P is the length of that text, and none of its tokens keeps the factors of short texts.
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class RotaryLengths(NamedTuple):
    """The lengths at which a model's rotary factors change.

    Attributes:
        threshold: a text of up to so many tokens has the factors of row 0 of a table.
        num_rows: of the table. A text of n tokens more has the factors of row n, or of the last one.
        refeeds: whether `generate` feeds all tokens anew as soon as the text is longer than the threshold. There are
            two rows then.
    """

    threshold: int = sys.maxsize
    num_rows: int = 1
    refeeds: bool = False

    @property
    def change(self) -> bool:
        """Whether factors change at all."""
        return self.num_rows > 1

    @property
    def refed_at(self) -> int | None:
        """Tokens of the longest text whose keys `generate` drops, to feed it anew; None if it never does."""
        return self.threshold if self.refeeds else None

    def row(self, length: int) -> int:
        """Return the row of the factors that a length has."""
        return max(0, min(length - self.threshold, self.num_rows - 1))

    def num_alike(self, prompt_length: int, num_tokens: int) -> int:
        """Return how many of a text's first tokens have the factors of its prompt.

        Args:
            prompt_length: P.
            num_tokens: of the text, prompt included.
        """
        is_last_row = self.row(prompt_length) == self.num_rows - 1  # which has no end
        return num_tokens if is_last_row else min(num_tokens, max(self.threshold, prompt_length))

    def told(self, prompt_length: int, start: int) -> int:
        """Return the length that a pass must be told: P where it feeds tokens of a long prompt, else 0.

        Args:
            prompt_length: P.
            start: position of the first token that the pass feeds.
        """
        return prompt_length if start < prompt_length and self.row(prompt_length) else 0

    def prompt_length(self, prompt_length: int, num_tokens: int) -> int:
        """Return P for a text of so many tokens: all of the text, where `generate` has fed it anew.

        Args:
            prompt_length: tokens of the request's prompt.
            num_tokens: of the text.
        """
        return num_tokens if self.refeeds and num_tokens > self.threshold else prompt_length

    def num_together(self, start: int, num_tokens: int) -> int:
        """Return how many of some tokens one pass may feed: none beyond a length with re-feeding together with others.

        Args:
            start: position of the first token.
            num_tokens: of a path, the first token included.
        """
        return min(num_tokens, self.threshold - start) if self.refeeds and start < self.threshold else num_tokens


UNCHANGING = RotaryLengths()  # of a model whose rotary factors do not change
