"""Published drafting methods as drafters of this runtime, to compare our drafting with.

They follow the rules of their published code. SAM decoding (arXiv 2411.10666) with a token recycling tree is
Spec-Bench's model/samd with its defaults. It looks up the longest suffix of the text that has occurred before. If the
suffix has 5 tokens or more, it copies 40 tokens that follow its first occurrence. Otherwise it fills the tree of
token_recycle.json from a table of top-k candidates, which the prompt's logits enter, too. RACER is in racer.py, Goose
in goose.py; token recycling and prompt lookup are drafters of the runtime (lp_runtime/lookahead/drafters).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.drafter import CountingDrafter, VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree

NUM_COPIED = 40  # tokens; model/samd's default
NUM_SHOWN = 10  # likeliest tokens that peers see, as many as Goose uses
MIN_MATCH = 5  # tokens of a suffix; model/samd's default
# Number of children of each node that has any, breadth first: token_recycle.json of Spec-Bench.
NUM_CHILDREN = {
    **{0: 7, 1: 6, 2: 5, 3: 3, 4: 2, 5: 2, 6: 1, 7: 1, 8: 3, 9: 2, 10: 2, 11: 1, 12: 1, 14: 3, 15: 2, 16: 1, 17: 1},
    **{19: 1, 20: 1, 22: 1, 24: 1, 26: 1, 28: 2, 29: 1, 31: 1, 37: 2, 40: 1, 44: 1, 49: 2, 51: 1, 53: 1},
}


class Peer(CountingDrafter):
    """Drafter of a published method; it sees more of the model than the runtime's own drafters do.

    The decoding loop calls `note_prompt` before the first token is committed, and `note_nodes` for every step's tree
    before `advance`.
    """

    def note_prompt(self, tokens: Sequence[int], ids: np.ndarray, logits: np.ndarray) -> None:
        """Learn from the prefill.

        Args:
            tokens: [n] the prompt.
            ids: [n, NUM_SHOWN] int64 the likeliest tokens after each, the likeliest first.
            logits: [n, NUM_SHOWN] float32 their logits.
        """

    def note_nodes(self, tree: TokenTree, ids: np.ndarray, logits: np.ndarray) -> None:
        """Learn from a step.

        Args:
            tree: the step's tree.
            ids: [n, NUM_SHOWN] int64 the likeliest tokens after each node from the root on.
            logits: [n, NUM_SHOWN] float32 their logits.
        """

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        pass


class SamDrafter(Peer):
    """SAM decoding with a recycling tree."""

    num_top_k = K

    def __init__(self) -> None:
        super().__init__("text", "top-k")
        self.max_nodes = max(NUM_COPIED, 1 + sum(NUM_CHILDREN.values()))
        self.max_committed = NUM_COPIED
        self._table: dict[int, np.ndarray] = {}
        self._is_copied = False  # whether the last tree was copied from the text

    def begin(self, tokens: Sequence[int]) -> None:
        pass

    def note_prompt(self, tokens: Sequence[int], ids: np.ndarray, logits: np.ndarray) -> None:
        for token, row in zip(tokens, ids, strict=True):
            self._table[token] = row[:K]

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        tree = TokenTree(tokens[num_cached:], max_depth)
        text = list(tokens[:-1])  # the last token is not in the automaton yet
        length = longest_match(text, tokens)
        self._is_copied = length >= MIN_MATCH
        if self._is_copied:
            while length > 1 and len(text) - first_end(text, tokens[-length:]) < NUM_COPIED:
                length -= 1
            place = first_end(text, tokens[-length:])
            tree.add_branch(text[place : place + NUM_COPIED - 1])
            return tree
        nodes: list[int | None] = [tree.root]
        for index in range(1 + max(NUM_CHILDREN)):
            parent = nodes[index]
            row = None if parent is None else self._table.get(tree.tokens[parent])
            for rank in range(NUM_CHILDREN.get(index, 0)):
                nodes.append(None if parent is None or row is None else tree.add(parent, int(row[rank])))
        return tree

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        assert result.top_k is not None
        for token, row in zip(tree.tokens[tree.root :], result.top_k, strict=True):
            self._table[token] = row
        nodes = range(tree.root + 1, len(tree))
        self.count(tree, path, [nodes if self._is_copied else (), nodes])


def longest_match(text: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the longest suffix of `tokens` that occurs in `text`; 0 for none."""
    best = 0
    for end in range(len(text), 0, -1):
        length = 0
        while length < min(end, len(tokens)) and text[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best


def first_end(text: Sequence[int], ngram: Sequence[int]) -> int:
    """Return the index after the first occurrence of an n-gram in a text; the n-gram must occur."""
    size = len(ngram)
    return next(end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(ngram))
