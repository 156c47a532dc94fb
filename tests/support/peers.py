"""Peers to compare drafting with, as drafters of this runtime, after the rules of their published code.

SAM decoding (arXiv 2411.10666) with a token recycling tree: Spec-Bench, model/samd, with its defaults: 40 tokens copied
from behind the first occurrence of the longest suffix that has occurred before, where that suffix has 5 tokens or more;
else the recycling tree token_recycle.json, filled from a table that the prompt's logits enter, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.drafters.base import CountingDrafter, VerificationResult
from lp_runtime.lookahead.drafters.best_first.tables import K
from lp_runtime.lookahead.tree import TokenTree

NUM_PREDICTED, LEAST_LENGTH = 40, 5
# Children of the nodes that have any, breadth first: token_recycle.json of Spec-Bench, as counts.
NUM_CHILDREN = {
    **{0: 7, 1: 6, 2: 5, 3: 3, 4: 2, 5: 2, 6: 1, 7: 1, 8: 3, 9: 2, 10: 2, 11: 1, 12: 1, 14: 3, 15: 2, 16: 1, 17: 1},
    **{19: 1, 20: 1, 22: 1, 24: 1, 26: 1, 28: 2, 29: 1, 31: 1, 37: 2, 40: 1, 44: 1, 49: 2, 51: 1, 53: 1},
}


class SamDrafter(CountingDrafter):
    """SAM decoding with a recycling tree."""

    num_top_k = K

    def __init__(self) -> None:
        super().__init__("text", "runners-up")
        self.max_nodes = max(NUM_PREDICTED, 1 + sum(NUM_CHILDREN.values()))
        self.max_committed = NUM_PREDICTED
        self._table: dict[int, np.ndarray] = {}
        self._copied = False

    def begin(self, tokens: Sequence[int]) -> None:
        pass

    def note_prompt(self, tokens: Sequence[int], entries: np.ndarray) -> None:
        """The prompt's own runners-up."""
        for token, row in zip(tokens, entries, strict=True):
            self._table[token] = row

    def propose(
        self, tokens: Sequence[int], num_cached: int, max_depth: int, tree_size_hint: int | None = None
    ) -> TokenTree:
        tree = TokenTree(tokens[num_cached:], max_depth)
        text = list(tokens[:-1])  # the last token is not in the automaton yet
        length = longest_match(text, tokens)
        self._copied = length >= LEAST_LENGTH
        if self._copied:
            while length > 1 and len(text) - first_end(text, tokens[-length:]) < NUM_PREDICTED:
                length -= 1
            place = first_end(text, tokens[-length:])
            tree.add_branch(text[place : place + NUM_PREDICTED - 1])
            return tree
        nodes: list[int | None] = [tree.root]
        for index in range(1 + max(NUM_CHILDREN)):
            row = None if nodes[index] is None else self._table.get(tree.tokens[nodes[index]])
            for rank in range(NUM_CHILDREN.get(index, 0)):
                nodes.append(None if row is None else tree.add(nodes[index], int(row[rank])))
        return tree

    def advance_prefill(self, tokens: Sequence[int], found: VerificationResult) -> None:
        pass

    def advance(
        self, tokens: Sequence[int], tree: TokenTree, found: VerificationResult, run: Sequence[int], path: Sequence[int]
    ) -> None:
        for token, row in zip(tree.tokens[tree.root :], found.top_k, strict=True):
            self._table[token] = row
        nodes = range(tree.root + 1, len(tree))
        self.count(tree, path, [nodes if self._copied else (), nodes])


def longest_match(text: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the longest suffix of `tokens` that occurs in `text`."""
    best = 0
    for end in range(len(text), 0, -1):
        length = 0
        while length < min(end, len(tokens)) and text[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best


def first_end(text: Sequence[int], ngram: Sequence[int]) -> int:
    """Where the first occurrence of an n-gram in a text ends."""
    size = len(ngram)
    return next(end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(ngram))
