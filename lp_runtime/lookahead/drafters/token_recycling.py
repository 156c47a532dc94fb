"""Token recycling (Luo et al., arXiv 2408.08696): a fixed tree of each token's last candidates.

The rules are those of the published code (Spec-Bench, inference_recycling.py). The table starts with zeros. Every node
that is fed overwrites its token's row with its 8 likeliest successors; the prefill's tokens do not. The tree is that
code's template 2.2.2, written here as the number of children of each node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.drafter import CountingDrafter, VerificationResult
from lp_runtime.lookahead.guide import Guide
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree

# Number of children of each inner node, by the ranks on the path from the root to it.
CHILDREN = {
    "": 8,
    **{"0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1},
    **{"00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1},
    **{"10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1},
    **{"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1},
    **{"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1},
    **{"00000": 2, "00010": 1},
}
# (path of the parent, rank of the child) of every node below the root, level by level.
TEMPLATE = [
    (path, rank) for path in sorted(CHILDREN, key=lambda path: (len(path), path)) for rank in range(CHILDREN[path])
]


class TokenRecyclingDrafter(CountingDrafter):
    """Proposes the template's tree, filled in; `budget` limits nodes, pending ones included, if given."""

    num_top_k = K

    def __init__(self, budget: int | None = None):
        super().__init__("top-k")
        self.max_nodes = 1 + len(TEMPLATE)
        self.max_committed = 2 + max(len(path) for path in CHILDREN)  # the deepest child's depth and the bonus token
        self._budget = budget
        self._table: dict[int, np.ndarray] = {}
        self._unseen_row = np.zeros(K, dtype=np.int64)

    def begin(self, tokens: Sequence[int]) -> None:
        pass

    def propose(
        self,
        tokens: Sequence[int],
        num_cached: int,
        max_depth: int,
        tree_size_hint: int | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        tree, certain = self.start_tree(tokens, num_cached, max_depth, self._budget, guide)
        nodes: dict[str, int | None] = {"": certain}
        for path, rank in TEMPLATE:
            parent = nodes[path]
            if parent is not None:
                row = self._table.get(tree.tokens[parent], self._unseen_row)
                candidate = int(row[rank])  # -1 if fewer than K tokens may follow, as with sampling.top_k=5
                parent = tree.add(parent, candidate) if candidate >= 0 else None
            nodes[path + str(rank)] = parent
        return tree

    def advance_prefill(self, tokens: Sequence[int]) -> None:
        pass

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
            self._table[token] = row[:K].copy()  # a view would keep the rows of all nodes
        self.count(tree, path, [range(tree.root + 1, len(tree))])
