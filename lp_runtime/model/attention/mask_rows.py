"""Rows of a token tree's masks, without torch, so that a process can compile while others import.

Letters: T nodes, S keys, committed ones first. `parents` are [T] indices among the nodes, each below its child's; -1
for none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.utils.jit import compiled, compiles


def ancestor_mask(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return [T, T] bool: row i is True at i and at the ancestors of i."""
    mask = np.empty((len(parents), len(parents)), dtype=np.bool_)
    _mark_ancestors(np.array(parents, dtype=np.int64), mask)
    return mask


@compiles
def compile_masks() -> None:
    ancestor_mask([-1, 0])
    additive_mask([-1, 0], 1, -1.0)


@compiled
def _mark_ancestors(parents, mask):
    for node in range(len(parents)):
        parent = parents[node]
        for other in range(parent + 1):
            mask[node, other] = mask[parent, other]
        for other in range(parent + 1, len(parents)):
            mask[node, other] = False
        mask[node, node] = True


def additive_mask(parents: Sequence[int] | np.ndarray, num_cached: int, lowest: float) -> np.ndarray:
    """Return [T, S] float32 to add to scores: `lowest` at hidden keys; 0 at committed, ancestors and self."""
    mask = np.empty((len(parents), num_cached + len(parents)), dtype=np.float32)
    _mark_hidden(np.asarray(parents, dtype=np.int64), num_cached, lowest, mask)
    return mask


@compiled
def _mark_hidden(parents, num_cached, lowest, mask):
    for node in range(len(parents)):
        parent, after_parent = parents[node], num_cached + parents[node] + 1
        for column in range(num_cached):
            mask[node, column] = 0
        for column in range(num_cached, after_parent):
            mask[node, column] = mask[parent, column]
        for column in range(after_parent, mask.shape[1]):
            mask[node, column] = lowest
        mask[node, num_cached + node] = 0
