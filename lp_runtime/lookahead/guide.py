"""What drafters ask of a constraint that the text is under: which tokens may follow, and which must.

Letters: T nodes in the tree, n of them from the root on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lp_runtime.utils.jit import compiled

WORD_BITS = 32  # tokens of a word of a mask


class Examined(NamedTuple):
    """What a constraint says of a tree.

    Attributes:
        is_allowed: [n] bool whether each node from the root on may stand where it stands: neither it nor an ancestor is
            forbidden or ends the text.
        forced: (node, tokens) of the nodes that were asked for and behind which something is certain: the likeliest
            tokens of the text that must follow.
    """

    is_allowed: np.ndarray
    forced: list[tuple[int, list[int]]]


class Guide(Protocol):
    """A constraint of a text, at the text's committed tokens.

    Attributes:
        ends: [e] int64 tokens that end the text.
    """

    ends: np.ndarray

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether a node with a token may stand at the end of a path, the tokens below the root on a tree's branch: not
        one that ends the text, nor -1, no token."""

    def forced(self, max_tokens: int) -> list[int]:
        """Return the likeliest tokens of the text that must follow what is committed; empty if nothing is certain.

        Args:
            max_tokens: length of the result at most.
        """

    def examine(self, tokens: np.ndarray, parents: np.ndarray, root: int, num_known: int, max_depth: int) -> Examined:
        """Return which nodes of a tree are allowed, and what must follow them; far cheaper than masks.

        Args:
            tokens: [T] int64 token ids.
            parents: [T] int64 index of each node's parent.
            root: index of the root.
            num_known: what must follow the first nodes, so many, is not asked for.
            max_depth: depth below the root of the last token that must follow at most.
        """

    def masks(
        self, tokens: np.ndarray, parents: np.ndarray, root: int, nodes: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return which tokens may follow some nodes of a tree.

        Args:
            tokens: [T] int64 token ids.
            parents: [T] int64 index of each node's parent.
            root: index of the root.
            nodes: [m] indices of the nodes, from the root on.

        Returns:
            [m, ceil(V / 32)] int32, a bit for each token; of a node that is not allowed itself, and below it, zeros.
        """

    def advance(self, committed: Sequence[int]) -> None:
        """Advance by committed tokens.

        Raises:
            ConstraintError: one of them is not allowed.
        """


@compiled
def is_allowed(masks: np.ndarray, row: int, token: int) -> bool:
    """Whether a mask, a row of `masks`, has the bit of a token."""
    return (masks[row, token >> 5] >> (token & 31)) & 1 != 0
