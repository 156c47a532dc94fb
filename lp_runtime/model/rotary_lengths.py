"""At which lengths of a text a model's rotary factors change, and what follows for keys that are kept.

Some rotary embeddings (transformers' "dynamic" and "longrope") have other factors beyond a length. What counts is the
longest position of a pass. `generate` feeds the prompt in one pass and then one token at a time, and keys stay as they
were rotated: so the token at position p has the factors of length

    L(p) = max(P, p + 1), with P tokens of the prompt.
"""

from __future__ import annotations

from typing import NamedTuple


class RotaryLengths(NamedTuple):
    """The lengths at which a model's rotary factors change.

    Attributes:
        tables: (threshold, rows) of each of the model's rotary embeddings that change: a text of up to `threshold`
            tokens has the factors of row 0, one of n more those of row min(n, rows - 1). Empty if none changes.
        refed_at: tokens of a text up to which `generate` keeps the keys; with the next token it computes all of them
            anew, so that all have the text's own factors. None if it never does.
    """

    tables: tuple[tuple[int, int], ...] = ()
    refed_at: int | None = None

    def rows(self, length: int) -> tuple[int, ...]:
        """Return which factors a length has, as a row of each table."""
        return tuple(max(0, min(length - threshold, num_rows - 1)) for threshold, num_rows in self.tables)

    def name(self, prompt_length: int) -> str:
        """Return a name of the factors that a prompt of so many tokens has; empty for those of short texts."""
        rows = self.rows(prompt_length)
        return f"rope {rows}" if any(rows) else ""

    def are_alike(self, first: int, second: int) -> bool:
        """Whether tokens behind prompts of two lengths have equal factors at every position."""
        return self.rows(first) == self.rows(second)

    def num_alike(self, prompt_length: int, num_tokens: int) -> int:
        """Return how many of a text's first tokens have the factors of its prompt.

        Args:
            prompt_length: P.
            num_tokens: of the text, prompt included.
        """
        most = num_tokens
        for threshold, num_rows in self.tables:
            if prompt_length - threshold < num_rows - 1:  # the last row has no end
                most = min(most, max(threshold, prompt_length))
        return most

    def told(self, prompt_length: int, start: int) -> int:
        """Return the length that a pass must be told: P where it feeds tokens of a long prompt, else 0.

        Args:
            prompt_length: P.
            start: position of the first token that the pass feeds.
        """
        return prompt_length if start < prompt_length and any(self.rows(prompt_length)) else 0

    def prompt_length(self, prompt_length: int, num_tokens: int) -> int:
        """Return P for a text of so many tokens: all of the text, where it was computed anew as a whole.

        Args:
            prompt_length: tokens of the request's prompt.
            num_tokens: of the text.
        """
        is_refed = self.refed_at is not None and num_tokens > self.refed_at
        return num_tokens if is_refed else prompt_length

    def num_together(self, start: int, num_tokens: int) -> int:
        """Return how many of some tokens one pass may feed: none behind `refed_at` together with one before.

        Args:
            start: position of the first token.
            num_tokens: of a path, the first token included.
        """
        if self.refed_at is None or start >= self.refed_at:
            return num_tokens
        return min(num_tokens, self.refed_at - start)


UNCHANGING = RotaryLengths()  # of a model whose rotary factors do not change
