"""How what is fed of a token tree lies in the input of a forward pass.

Letters: T tokens fed, n nodes whose successors are wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import bound, compiled, with_fresh_cache


class InputLayout(NamedTuple):
    """What is fed of a tree, [T] int64 each: tokens, positions, parents among what is fed, -1 for none; and where the
    wanted nodes stand in it, [n]."""

    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    rows: np.ndarray


def lay_out(tree: TokenTree, nodes: Sequence[int], wanted: Sequence[int], num_cached: int) -> InputLayout:
    """Lay a share of a tree out.

    Args:
        tree: the step's tree.
        nodes: [T] ascending indices into the tree: all pending tokens, and every fed node's ancestors.
        wanted: [n] ascending indices into the tree, a part of `nodes`.
        num_cached: committed tokens; the tree's first pending token stands behind them.
    """
    laid, rows = np.empty((3, len(nodes)), np.int64), np.empty(len(wanted), np.int64)
    nodes, wanted = np.ascontiguousarray(nodes, np.int64), np.ascontiguousarray(wanted, np.int64)
    _kernel()(*tree.arrays(), nodes, wanted, num_cached + tree.root, laid, rows)
    return InputLayout(*laid, rows)


@functools.cache
def compile_layout() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""
    with_fresh_cache(_kernel)


@functools.cache
def _kernel() -> Callable:
    """`_lay_out` for arguments of its types."""
    integers = np.zeros(1, np.int64)
    return bound(_lay_out, *[integers] * 5, 0, np.zeros((3, 1), np.int64), integers)


@compiled(makes_arrays=True)
def _lay_out(tokens, parents, depths, nodes, wanted, position, laid, rows):
    """Write tokens, positions and parents of what is fed, [3, T], and where the wanted nodes stand in it, [n].

    Args:
        tokens, parents, depths: the tree's.
        position: the root's.
    """
    places = np.empty(len(tokens), np.int64)
    for i in range(len(nodes)):
        node = nodes[i]
        parent = parents[node]
        places[node] = i
        laid[0, i], laid[1, i] = tokens[node], depths[node] + position
        laid[2, i] = places[parent] if parent >= 0 else -1
    for i in range(len(wanted)):
        rows[i] = places[wanted[i]]


def grain(num_tokens: int) -> int:
    """What the number of tokens of several texts is rounded up to a multiple of on CPUs, by an eighth at most: oneDNN
    compiles its products anew for each size that it meets, and keeps what it has compiled."""
    return 1 << max(0, num_tokens.bit_length() - 4)
