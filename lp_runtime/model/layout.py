"""How what is fed of a token tree lies in the input of a forward pass.

Letters: T tokens fed, n nodes whose successors are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.tree import TokenTree


class Layout(NamedTuple):
    """What is fed of a tree, [T] int64 each: tokens, positions, parents among what is fed, -1 for none; and where the
    wanted nodes stand in it, [n]."""

    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    rows: np.ndarray


def lay_out(tree: TokenTree, nodes: Sequence[int], wanted: Sequence[int], num_cached: int) -> Layout:
    """Lay a share of a tree out.

    Args:
        tree: the step's tree.
        nodes: [T] ascending indices into the tree: all pending tokens, and every fed node's ancestors.
        wanted: [n] ascending indices into the tree, a part of `nodes`.
        num_cached: committed tokens; the tree's first pending token stands behind them.
    """
    tokens, parents, depths = tree.arrays()
    if len(wanted) and wanted[-1] - wanted[0] == len(wanted) - 1:
        rows = np.arange(wanted[0], wanted[-1] + 1)  # a list takes longer
    else:
        rows = np.asarray(wanted, dtype=np.int64)
    if len(nodes) < len(tree):
        fed = np.asarray(nodes, dtype=np.int64)
        places = np.full(len(tree) + 1, -1)  # the last is that of no node
        places[fed] = np.arange(len(fed))
        tokens, parents, depths, rows = tokens[fed], places[parents[fed]], depths[fed], places[rows]
    return Layout(tokens, depths + (num_cached + tree.root), parents, rows)


def grain(num_tokens: int) -> int:
    """What the number of tokens of several texts is rounded up to a multiple of on CPUs, by an eighth at most: oneDNN
    compiles its products anew for each size that it meets, and keeps what it has compiled."""
    return 1 << max(0, num_tokens.bit_length() - 4)
