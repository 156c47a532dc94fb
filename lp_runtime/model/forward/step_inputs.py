"""Inputs of one sequence for the forward pass of a step.

Letters: T tokens fed, n nodes whose successors are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.kv_cache.slots import CacheSlot


class StepInputs(NamedTuple):
    """A sequence's share of a step's tree, as fed by this replica."""

    # The tree's first pending token follows its last committed one, and the pending tokens are committed to it.
    slot: CacheSlot
    tree: TokenTree
    # [T] ascending indices into the tree of the fed nodes: all pending tokens, and every fed node's ancestors.
    nodes: Sequence[int] | np.ndarray
    # [n] ascending indices into the tree of the nodes whose logits are returned, a subset of `nodes`.
    wanted: Sequence[int] | np.ndarray
    # Tokens of the sequence before the first fed one; None for all that the slot holds. A replica that is fed chains
    # may already hold some of the pending tokens.
    start: int | None = None

    @classmethod
    def whole(cls, slot: CacheSlot, tree: TokenTree) -> StepInputs:
        nodes = np.arange(len(tree))
        return cls(slot, tree, nodes, nodes[tree.root :])
