"""Prompt lookup: proposes the tokens after an earlier occurrence of the last tokens, as one chain.

After https://github.com/apoorvumang/prompt-lookup-decoding; n-grams have at most 3 tokens in both. The longest n-gram
wins, and of its occurrences the earliest one that is followed by a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from lp_runtime.lookahead.drafter import CountingDrafter, VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.tree import TokenTree

MAX_NGRAM = 3  # tokens, as in the published code


class PromptLookupDrafter(CountingDrafter):
    """Proposes one chain of copied tokens; `budget` limits the nodes, pending ones included, if given."""

    def __init__(self, num_copied: int, budget: int | None = None):
        super().__init__("text")
        self.max_nodes = 1 + num_copied
        self.max_committed = num_copied + 1
        self._num_copied = num_copied
        self._budget = budget
        self._places: dict[tuple[int, ...], int] = {}  # index of the token after each n-gram's first occurrence
        self._num_indexed = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._index(tokens)

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams of tokens not indexed yet."""
        # N-grams that end with the last token are left for later: no token follows them yet.
        for end in range(max(1, self._num_indexed), len(tokens)):
            for size in range(1, min(MAX_NGRAM, end) + 1):
                self._places.setdefault(tuple(tokens[end - size : end]), end)
        self._num_indexed = len(tokens)

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        tree, certain = self.start_tree(tokens, num_cached, max_depth, self._budget, guide)
        last = [*tokens[-MAX_NGRAM:], *tree.path(certain)][-MAX_NGRAM:]
        for size in range(len(last), 0, -1):
            place = self._places.get(tuple(last[-size:]))
            if place is not None:
                tree.add_branch(tokens[place : place + self._num_copied], certain)
                break
        return tree

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        self._index(tokens)

    def advance(
        self,
        tokens: Sequence[int],
        tree: TokenTree,
        result: VerificationResult,
        committed: Sequence[int],
        path: Sequence[int],
    ) -> None:
        self._index(tokens)
        self.count(tree, path, [range(tree.root + 1, len(tree))])
