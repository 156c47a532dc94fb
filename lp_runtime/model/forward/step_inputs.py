"""What a step feeds to the model for one sequence.

Letters: T tokens fed, n nodes whose successors are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.sampling.step_logits import StepLogits as StepLogits  # what a forward pass returns for it


class StepInputs(NamedTuple):
    """What one sequence feeds in a step on this replica.

    Attributes:
        slot: holds the sequence's keys and values; the tree's pending tokens are committed to it.
        tree: the step's token tree; its first pending token follows the slot's last committed one.
        nodes: [T] ascending indices into the tree of what is fed: all pending tokens, and every fed node's ancestors.
        wanted: [n] ascending indices into the tree of the nodes whose logits are returned, a part of `nodes`.
        start: tokens of the sequence before the first one that is fed; None for all that the slot holds. A replica
            that is fed chains may hold some of the pending tokens already.
    """

    slot: CacheSlot
    tree: TokenTree
    nodes: Sequence[int] | np.ndarray
    wanted: Sequence[int] | np.ndarray
    start: int | None = None

    @classmethod
    def whole(cls, slot: CacheSlot, tree: TokenTree) -> StepInputs:
        """All nodes of a tree, wanted from the root on."""
        nodes = np.arange(len(tree))
        return cls(slot, tree, nodes, nodes[tree.root :])
