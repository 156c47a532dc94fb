"""The lookahead window of Jacobi guesses: W columns, N - 1 levels (paper, section 3.1, figure 2).

Column i of level r guesses the token i + r positions after the root. Level 0 of column 0 is the root itself. A token of
level r is the model's successor of level r - 1 of its column. Level 0 is the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lp_runtime.lookahead.tree import TokenTree

Slots = list[list[int | None]]  # [levels][W]: the tree node of each slot, None if it is not fed


class Window:
    """W x (N - 1) guesses; starts with level 0, and each of the first N - 2 steps fills one more level.

    Args:
        refill: maps the token before a slot (None if unknown) to a first guess for the slot.

    Attributes:
        levels: [levels][W] token ids, the oldest level first; up to num_levels of them.
    """

    def __init__(self, num_columns: int, ngram_size: int, refill: Callable[[int | None], int]):
        self.num_columns = num_columns
        self.num_levels = ngram_size - 1
        self._refill = refill
        self.levels: list[list[int]] = [self._extend([], num_columns)]

    @property
    def is_full(self) -> bool:
        """Whether all N - 1 levels are filled, so that each step completes W n-grams."""
        return len(self.levels) == self.num_levels

    def place(self, tree: TokenTree) -> Slots:
        """Add the window to a tree and return the node of each slot.

        Level 0 becomes a chain from the root. Level r of a column becomes the child of level r - 1.
        """
        node: int | None = tree.root
        chain: list[int | None] = [node]
        for token in self.levels[0][1:]:
            node = None if node is None else tree.add(node, token)
            chain.append(node)
        slots: Slots = [chain]
        for level in self.levels[1:]:
            above = slots[-1]
            slots.append([None if p is None else tree.add(p, t) for p, t in zip(above, level, strict=True)])
        return slots

    def ngrams(self, tree: TokenTree, slots: Slots, successors: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the n-grams that a step completed, one for each column whose last level was fed.

        Each has N token ids; there are none until the window is full. `slots` are what `place` returned for the step;
        `successors`, [T], follow the tree's nodes, -1 where no token may follow.
        """
        if not self.is_full:
            return []
        return [
            (*(tree.tokens[node] for level in slots if (node := level[i]) is not None), successors[last])
            for i, last in enumerate(slots[-1])
            if last is not None and successors[last] >= 0
        ]

    def advance(self, slots: Slots, successors: Sequence[int], num_committed: int) -> None:
        """Append the step's new level, drop the oldest if the window is full, and slide past committed tokens.

        Arguments as in `ngrams`.
        """
        new_level = [None if node is None or successors[node] < 0 else successors[node] for node in slots[-1]]
        slide = num_committed
        levels: list[Sequence[int | None]] = [*self.levels, new_level]
        if self.is_full:
            levels = levels[1:]  # level 1 becomes level 0, which is one position later: one column less to slide
            slide -= 1
        self.levels = [self._extend(level[slide:], self.num_columns) for level in levels]

    def _extend(self, level: Sequence[int | None], length: int) -> list[int]:
        """Extend a level to `length` and fill its empty slots with first guesses."""
        filled: list[int] = []
        previous: int | None = None
        for token in [*level, *[None] * (length - len(level))]:
            previous = self._refill(previous) if token is None else token
            filled.append(previous)
        return filled
