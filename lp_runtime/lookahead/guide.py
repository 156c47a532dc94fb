"""What drafters ask of a constraint that the text is under: which tokens may follow, and which must.

Letters: T nodes in the tree, n of them from the root on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lp_runtime.utils.jit import compiled

WORD_BITS = 32  # tokens of a word of a mask


class Guide(Protocol):
    """A constraint of a text, at the text's committed tokens. A path is the tokens below the root on a tree's branch.

    Attributes:
        ends: [e] int64 tokens that end the text.
    """

    ends: np.ndarray

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether a node with a token may stand at the end of a path: not one that ends the text, nor -1, no token."""

    def forced(self, path: Sequence[int], max_tokens: int) -> list[int]:
        """Return the likeliest tokens of the text that must follow a path; empty if nothing is certain.

        Args:
            path: tokens below the root.
            max_tokens: length of the result at most.
        """

    def masks(self, tokens: np.ndarray, parents: np.ndarray, root: int) -> np.ndarray:
        """Return which tokens may follow the nodes of a tree.

        Args:
            tokens: [T] int64 token ids.
            parents: [T] int64 index of each node's parent.
            root: index of the root.

        Returns:
            [n, ceil(V / 32)] int32, a bit for each token; of a node that is not allowed itself, and below it, zeros.
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


@compiled
def allows_few(masks: np.ndarray, row: int, limit: int) -> bool:
    """Whether a mask, a row of `masks`, has at least one and at most `limit` bits."""
    num = 0
    for word in range(masks.shape[1]):
        bits = masks[row, word]
        while bits != 0:
            bits &= bits - np.int32(1)
            num += 1
            if num > limit:
                return False
    return num > 0
