"""Layout of a share of a token tree as the flat arrays of a forward pass.

Letters: T tokens fed, n nodes whose successors are wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import bound, compiled, compiles


class InputLayout(NamedTuple):
    """A share of a tree as flat int64 arrays."""

    tokens: np.ndarray  # [T] token ids
    positions: np.ndarray  # [T] absolute positions
    parents: np.ndarray  # [T] row of each token's parent; -1 for the first token
    rows: np.ndarray  # [n] rows of the wanted nodes


def lay_out(
    tree: TokenTree, nodes: Sequence[int] | np.ndarray, wanted: Sequence[int] | np.ndarray, num_cached: int
) -> InputLayout:
    """Return a share of a tree as flat arrays.

    `nodes`, [T], and `wanted`, [n], a subset, are ascending indices into the tree: all pending tokens, and every fed
    node's ancestors. The tree's first pending token follows the slot's `num_cached` committed ones.
    """
    arrays, rows = np.empty((3, len(nodes)), np.int64), np.empty(len(wanted), np.int64)
    nodes, wanted = np.ascontiguousarray(nodes, np.int64), np.ascontiguousarray(wanted, np.int64)
    _kernel()(*tree.arrays(), nodes, wanted, num_cached + tree.root, arrays, rows)
    tokens, positions, parents = arrays
    return InputLayout(tokens, positions, parents, rows)


@compiles
def compile_layout() -> None:
    _kernel()


@functools.cache
def _kernel() -> Callable:
    integers = np.zeros(1, np.int64)
    return bound(_lay_out, *[integers] * 5, 0, np.zeros((3, 1), np.int64), integers)


@compiled(makes_arrays=True)
def _lay_out(tokens, parents, depths, nodes, wanted, position, arrays, rows):
    """Write tokens, positions and parents of a share to `arrays`, [3, T], and wanted rows to `rows`, [n].

    `tokens`, `parents` and `depths` are of the whole tree; `position` is the absolute position of its root.
    """
    places = np.empty(len(tokens), np.int64)
    for i in range(len(nodes)):
        node = nodes[i]
        parent = parents[node]
        places[node] = i
        arrays[0, i], arrays[1, i] = tokens[node], depths[node] + position
        arrays[2, i] = places[parent] if parent >= 0 else -1
    for i in range(len(wanted)):
        rows[i] = places[wanted[i]]


def concatenated(layouts: Sequence[InputLayout], num_padding: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return several sequences' shares as one input, padded with zeros: (tokens, positions, wanted rows)."""
    sizes = [len(layout.tokens) for layout in layouts]
    starts = np.cumsum(sizes) - sizes
    padding = np.zeros(num_padding, np.int64)
    tokens = np.concatenate([*(layout.tokens for layout in layouts), padding])
    positions = np.concatenate([*(layout.positions for layout in layouts), padding])
    return tokens, positions, np.concatenate([start + each.rows for start, each in zip(starts, layouts, strict=True)])


def rounding_of(num_tokens: int) -> int:
    """Return the power of two to whose multiple the tokens of a batch are padded, on a CPU.

    oneDNN compiles and caches a matrix product for each size that it sees. Rounding limits them, and adds at most an
    eighth.
    """
    return 1 << max(0, num_tokens.bit_length() - 4)
