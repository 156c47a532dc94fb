"""The lookahead window: W columns of Jacobi guesses, N - 1 levels deep (paper, section 3.1 and figure 2).

Column i of level r guesses the token i + r positions after the root. Level 0 of column 0 is the root itself; a token
of level r is what the model said follows level r - 1 of the same column. The oldest level is level 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lp_runtime.lookahead.tree import TokenTree

Slots = list[list[int | None]]  # [levels][W]: the tree node of each slot, None where the tree has no room for it


class Window:
    """W x (N - 1) guesses. It starts with level 0 alone; each of the first N - 2 steps fills one more level.

    Args:
        num_columns: W, >= 1.
        ngram_size: N, >= 2.
        refill: maps the token before a slot (None if unknown) to a first guess for the slot.
    """

    def __init__(self, num_columns: int, ngram_size: int, refill: Callable[[int | None], int]):
        self.num_columns = num_columns
        self.num_levels = ngram_size - 1
        self._refill = refill
        self.levels: list[list[int]] = [self._extend([], num_columns)]

    @property
    def is_full(self) -> bool:
        """Whether warm-up is over: all N - 1 levels are there, so a step completes W n-grams."""
        return len(self.levels) == self.num_levels

    def place(self, tree: TokenTree) -> Slots:
        """Add the window to the tree: level 0 a chain from the root, level r of a column under its level r - 1."""
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
        """The n-grams that this step completed, one a column whose last level was fed; none during warm-up."""
        if not self.is_full:
            return []
        return [
            (*(tree.tokens[level[i]] for level in slots), successors[node])
            for i, node in enumerate(slots[-1])
            if node is not None
        ]

    def advance(self, slots: Slots, successors: Sequence[int], num_committed: int) -> None:
        """Append the level that the step made, drop the oldest (after warm-up) and slide past what was committed.

        Args:
            slots: what `place` returned for this step.
            successors: [T] the token that follows each node.
            num_committed: tokens this step committed, >= 1.
        """
        made = [None if node is None else successors[node] for node in slots[-1]]
        slide = num_committed
        levels: list[list[int | None]] = [*self.levels, made]
        if self.is_full:
            levels = levels[1:]  # level 1 becomes level 0: one position later, which is one column of the slide
            slide -= 1
        self.levels = [self._extend(level[slide:], self.num_columns) for level in levels]

    def _extend(self, level: list[int | None], length: int) -> list[int]:
        """Fill the gaps of a level, and lengthen it to `length`, with first guesses."""
        filled: list[int] = []
        previous: int | None = None
        for token in [*level, *[None] * (length - len(level))]:
            previous = self._refill(previous) if token is None else token
            filled.append(previous)
        return filled
