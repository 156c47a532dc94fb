"""Text lengths at which a model's rotary factors change, and the consequences for cached keys.

Some rotary embeddings (transformers' "dynamic" and "longrope") use other factors beyond a length: that of the longest
position of a pass. `generate` feeds the prompt in one pass and then one token at a time, and cached keys keep their
rotation. So the token at position p has the factors of length

    L(p) = max(P, p + 1), where P is the number of prompt tokens.

Some model types re-feed: when the text exceeds the threshold, `generate` drops the cached keys and feeds the whole text
in one pass. From then on P is the length of that text, and no token keeps the factors of short texts.
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class RotaryLengths(NamedTuple):
    """The lengths at which a model's rotary factors change.

    Factors are rows of a table (modules/rotary.py). Row 0 is for texts of up to `threshold` tokens, row n for n tokens
    more; the last row is also for longer texts.
    """

    threshold: int = sys.maxsize
    num_rows: int = 1  # rows of the table; 1 if factors never change
    # Whether `generate` re-feeds the whole text once it is longer than the threshold. `num_rows` is then 2.
    refeeds: bool = False

    @property
    def change(self) -> bool:
        return self.num_rows > 1

    @property
    def refed_at(self) -> int | None:
        """The threshold in tokens: `generate` re-feeds texts that are longer. None if it never does."""
        return self.threshold if self.refeeds else None

    def row(self, length: int) -> int:
        """Return the row of the factors for a text length."""
        return max(0, min(length - self.threshold, self.num_rows - 1))

    def num_shared(self, prompt_length: int, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens of a text have the factors of its prompt, P long."""
        is_last_row = self.row(prompt_length) == self.num_rows - 1  # valid for any greater length
        return num_tokens if is_last_row else min(num_tokens, max(self.threshold, prompt_length))

    def rope_length(self, prompt_length: int, start: int) -> int:
        """Return the text length whose rotary factors a pass must use; 0 if each token uses its own.

        It is P if the pass starts inside the prompt, at position `start`, and the prompt is longer than the threshold.
        """
        return prompt_length if start < prompt_length and self.row(prompt_length) else 0

    def prompt_length(self, prompt_length: int, num_tokens: int) -> int:
        """Return P for a text: its whole length if `generate` has re-fed it, else that of the prompt."""
        return num_tokens if self.refeeds and num_tokens > self.threshold else prompt_length

    def num_together(self, start: int, num_tokens: int) -> int:
        """Return how many tokens of a path that begins at position `start` one pass may feed.

        With re-feeding, tokens up to the threshold and tokens beyond it need separate passes.
        """
        return min(num_tokens, self.threshold - start) if self.refeeds and start < self.threshold else num_tokens


UNCHANGING = RotaryLengths()  # of a model whose rotary factors do not change
