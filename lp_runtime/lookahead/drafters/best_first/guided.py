"""Trees of a text under a constraint: what is certain is planted, what is forbidden is pruned. Compiled by Numba.

Letters: T nodes in the tree, n of them from the root on.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.lookahead.drafters.best_first.candidates import FORCED, Nodes
from lp_runtime.lookahead.drafters.best_first.tables import NUM_HASHES, DraftArrays, Int, extend_hashes
from lp_runtime.lookahead.guide import allows_few, is_allowed
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.utils.jit import compiled

# What is certain is a text; which tokens spell it is not, but nearly so: a token fails once in 1 << 5.
DOUBT_BITS = 5
MAX_CERTAIN = 64  # tokens that may follow where a text is certain: those that begin it, fewer than a token has bytes


@compiled
def plant_root(drafts: DraftArrays, nodes: Nodes, root: Int) -> None:
    """Write what `plant` reads of the root: it is certain, and its context is the text."""
    nodes.path_probabilities[root] = np.int64(1) << PATH_PROBABILITY_BITS
    nodes.depths[root] = 0
    for i in range(NUM_HASHES):
        nodes.hashes[root, i] = drafts.text.hashes[0, i]


@compiled
def plant(nodes: Nodes, size: Int, parent: Int, chain: np.ndarray, max_nodes: Int) -> Int:
    """Add a chain of tokens that are certain below a node, as far as they are not there.

    Args:
        nodes: the tree.
        size: number of nodes.
        parent: index of the node.
        chain: [m] int64 token ids.
        max_nodes: largest number of nodes.

    Returns:
        The new number of nodes.
    """
    for token in chain:
        probability = nodes.path_probabilities[parent] - (nodes.path_probabilities[parent] >> DOUBT_BITS)
        node = parent + 1
        while node < size and not (nodes.parents[node] == parent and nodes.tokens[node] == token):
            node += 1
        if node == size:
            if size == max_nodes:
                break
            nodes.tokens[node], nodes.parents[node], nodes.sources[node] = token, parent, FORCED
            nodes.depths[node] = nodes.depths[parent] + 1
            nodes.path_probabilities[node] = probability
            extend_hashes(nodes.hashes, parent, token, nodes.hashes, node)
            size += 1
        nodes.path_probabilities[node] = max(nodes.path_probabilities[node], probability)
        parent = node
    return size


@compiled
def prune(nodes: Nodes, masks: np.ndarray, ends: np.ndarray, places: np.ndarray, root: Int, size: Int) -> Int:
    """Remove the nodes whose tokens may not follow their parents, or end the text, with all below them.

    Args:
        nodes: the tree.
        masks: [n, words] int32 bits of the tokens that may follow each node from the root on; rows move with nodes.
        ends: [e] int64 tokens that end the text.
        places: [T] int64 scratch.
        root: index of the root.
        size: number of nodes, T.

    Returns:
        The new number of nodes.
    """
    num_kept = root + 1
    places[root] = root
    for node in range(root + 1, size):
        parent = places[nodes.parents[node]]
        places[node] = -1
        token = nodes.tokens[node]
        is_end = False
        for end in ends:
            is_end |= end == token
        if parent < 0 or is_end or not is_allowed(masks, parent - root, token):
            continue
        places[node] = num_kept
        nodes.parents[node] = parent
        move(nodes, node, num_kept)
        for word in range(masks.shape[1]):
            masks[num_kept - root, word] = masks[node - root, word]
        num_kept += 1
    return num_kept


@compiled
def move(nodes: Nodes, node: Int, to: Int) -> None:
    """Copy a node to another place of the tree."""
    for row in range(nodes.rows.shape[0]):
        nodes.rows[row, to] = nodes.rows[row, node]
    nodes.sources[to] = nodes.sources[node]
    for i in range(NUM_HASHES):
        nodes.hashes[to, i] = nodes.hashes[node, i]


@compiled
def find_certain(masks: np.ndarray, certain: np.ndarray) -> None:
    """Write to `certain`, [n] bool, behind which nodes the text may be certain, by their masks, [n, words] int32."""
    for row in range(len(masks)):
        certain[row] = allows_few(masks, row, MAX_CERTAIN)


def sort(nodes: Nodes, root: int, size: int) -> np.ndarray:
    """Sort nodes by path probability, the highest first and parents before children.

    Returns:
        [n] int64 the place before, counted from the root, of each node from the root on.
    """
    order = np.argsort(-nodes.path_probabilities[root:size], kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    nodes.rows[:, root:size] = nodes.rows[:, root:size][:, order]
    nodes.sources[root:size] = nodes.sources[root:size][order]
    nodes.hashes[root:size] = nodes.hashes[root:size][order]
    nodes.parents[root + 1 : size] = places[nodes.parents[root + 1 : size] - root] + root
    return order
