"""What a step feeds to the model for one sequence, and what the forward pass returns.

Letters: T tokens fed, n nodes whose successors are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.kv_cache.slots import CacheSlot


class StepInputs(NamedTuple):
    """What one sequence feeds in a step on this replica.

    Attributes:
        slot: holds the sequence's keys and values; the tree's pending tokens are committed to it.
        tree: the step's token tree; its first pending token follows the slot's last committed one.
        nodes: [T] ascending indices into the tree of what is fed: all pending tokens, and every fed node's ancestors.
        wanted: [n] ascending indices into the tree of the nodes whose logits are returned, a part of `nodes`.
    """

    slot: CacheSlot
    tree: TokenTree
    nodes: Sequence[int] | np.ndarray
    wanted: Sequence[int] | np.ndarray

    @classmethod
    def whole(cls, slot: CacheSlot, tree: TokenTree) -> StepInputs:
        """All nodes of a tree, wanted from the root on."""
        nodes = np.arange(len(tree))
        return cls(slot, tree, nodes, nodes[tree.root :])


class StepLogits(NamedTuple):
    """What a forward pass found; of a pass of a fixed size, valid until the next pass.

    Attributes:
        logits: [n, V] float32, of the wanted nodes.
        presampled: [n, width] int64, what greedy sampling picks from `logits`, packed as sampling/sampler.py says,
            where a pass of a fixed size has computed it; else None.
    """

    logits: torch.Tensor
    presampled: torch.Tensor | None = None

    def copy(self) -> StepLogits:
        """Return what stays valid: a copy."""
        return StepLogits(self.logits.clone(), None if self.presampled is None else self.presampled.clone())
