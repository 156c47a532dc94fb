"""The interface of a constraint as drafters use it: which tokens may follow, and which must.

Letters: T nodes in the tree, n of them from the root on, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lp_runtime.utils.jit import compiled

TOKENS_PER_WORD = 32  # bits of a mask, one for each token


class Examined(NamedTuple):
    """A constraint's verdict on a tree.

    Attributes:
        is_allowed: [n] bool for each node from the root on: false if it or an ancestor is forbidden or ends the text.
        forced: (node, tokens) of nodes after which the text is certain: its likeliest tokens.
    """

    is_allowed: np.ndarray
    forced: list[tuple[int, list[int]]]


class Guide(Protocol):
    """A constraint's state after the committed tokens; `ends` are [e] int64 tokens that end the text."""

    ends: np.ndarray

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Return whether a token may follow `path`, the tokens below the root.

        False for tokens that end the text and for -1, which stands for no token.
        """

    def forced(self, max_tokens: int) -> list[int]:
        """Return the at most `max_tokens` likeliest tokens that must come next; empty if none is certain."""

    def examine(self, tokens: np.ndarray, parents: np.ndarray, root: int, num_known: int, max_depth: int) -> Examined:
        """Return which nodes of a tree are allowed, and which text must follow them; far cheaper than masks.

        Args:
            tokens, parents: [T] int64 token ids, and indices of the nodes' parents.
            num_known: nodes before this index get no forced tokens: theirs are known already.
            max_depth: largest depth below the root of a forced token.
        """

    def masks(
        self, tokens: np.ndarray, parents: np.ndarray, root: int, nodes: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return bit masks, [m, ceil(V / 32)] int32, of the tokens that may follow m nodes from the root on.

        A mask is all zeros for a node that is not allowed or below such a node.
        """

    def advance(self, committed: Sequence[int]) -> None:
        """Advance by committed tokens. Raises ConstraintError if one is not allowed."""

    def check_dead_end(self) -> None:
        """Raise ConstraintError if no token may follow the text, although it has not ended."""


@compiled
def is_allowed(masks: np.ndarray, row: int, token: int) -> bool:
    """Return whether row `row` of `masks` allows a token."""
    return (masks[row, token >> 5] >> (token & 31)) & 1 != 0
