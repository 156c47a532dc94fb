"""Trees of a constrained text: forced tokens are planted, forbidden ones pruned. Compiled by Numba.

Letters: T nodes in the tree, n of them from the root on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.corpus import extend_match, match_root
from lp_runtime.lookahead.drafters.best_first.features import FORCED, Nodes
from lp_runtime.lookahead.drafters.best_first.tables import NUM_HASHES, DraftArrays, extend_hashes
from lp_runtime.lookahead.guide import is_allowed
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.utils.jit import Int, compiled, inlined

# Forced text is certain; how it is divided into tokens is only nearly so: assume that a token fails once in 1 << 5.
DOUBT_BITS = 5


class Limits(NamedTuple):
    """Known restrictions of a constraint on the nodes of a tree.

    Attributes:
        masks: [m, words] int32 bits of the tokens that may follow each of the first m nodes from the root on.
        refused: [r, 2] int64 (node, token) pairs refused below other nodes.
    """

    masks: np.ndarray
    refused: np.ndarray

    def without_removed(self, tokens: np.ndarray, parents: np.ndarray, places: np.ndarray, root: int) -> Limits:
        """Return the limits after some nodes of the tree were removed: those nodes are refused from now on.

        `tokens` and `parents`, [T] int64, are from before the removal. `places`, [T] int64, has the new index of each
        node from the root on, -1 if it was removed.
        """
        removed = np.flatnonzero(places[root:] < 0) + root
        refused = np.concatenate([self.refused, np.stack([parents[removed], tokens[removed]], axis=1)])
        refused[:, 0] = places[refused[:, 0]]
        return Limits(self.masks[places[root : root + len(self.masks)] >= 0], refused[refused[:, 0] >= 0])


NO_LIMITS = Limits(np.zeros((0, 0), np.int32), np.zeros((0, 2), np.int64))


@inlined
def is_refused(limits: Limits, root: Int, node: Int, token: Int) -> bool:
    """Return whether a token is known to be forbidden after a node."""
    if node - root < len(limits.masks):
        return not is_allowed(limits.masks, node - root, token)
    for refused in limits.refused:  # noqa: SIM110 (Numba compiles no generators)
        if refused[0] == node and refused[1] == token:
            return True
    return False


@compiled
def plant_root(drafts: DraftArrays, nodes: Nodes, root: Int) -> None:
    """Initialize the pending tokens, and the root as `plant` requires: certain, its context the text."""
    for node in range(root + 1):
        nodes.parents[node], nodes.depths[node] = node - 1, node - root
    nodes.path_probabilities[root] = np.int64(1) << PATH_PROBABILITY_BITS
    for i in range(NUM_HASHES):
        nodes.hashes[root, i] = drafts.text.hashes[0, i]
    match_root(drafts.corpus, drafts.text.buffer, drafts.text.span, nodes.matches, root)


@compiled
def plant(drafts: DraftArrays, nodes: Nodes, size: Int, parent: Int, chain: np.ndarray, max_nodes: Int) -> Int:
    """Add a chain of forced tokens, [m] int64, below node `parent`; return the new number of nodes.

    Nodes that exist already are reused. `size` is the number of nodes before.
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
            extend_match(drafts.corpus, nodes.matches, parent, token, node)
            size += 1
        nodes.path_probabilities[node] = max(nodes.path_probabilities[node], probability)
        parent = node
    return size


@compiled
def prune(nodes: Nodes, is_node_allowed: np.ndarray, places: np.ndarray, root: Int, size: Int) -> Int:
    """Remove the nodes that are not allowed; return the new number of nodes.

    `is_node_allowed`, [n] bool from the root on, must be false below a node that is not allowed. `places`, [T] int64,
    receives the new index of each node from the root on, -1 if it was removed. `size` is T.
    """
    num_kept = root + 1
    places[root] = root
    for node in range(root + 1, size):
        places[node] = -1
        if is_node_allowed[node - root]:
            places[node] = num_kept
            nodes.parents[node] = places[nodes.parents[node]]
            move(nodes, node, num_kept)
            num_kept += 1
    return num_kept


@inlined
def move(nodes: Nodes, node: Int, to: Int) -> None:
    """Copy a node to another index of the tree."""
    for row in range(nodes.rows.shape[0]):
        nodes.rows[row, to] = nodes.rows[row, node]
    nodes.sources[to] = nodes.sources[node]
    for i in range(NUM_HASHES):
        nodes.hashes[to, i] = nodes.hashes[node, i]
    for i in range(3):
        nodes.matches[to, i] = nodes.matches[node, i]


def sort(nodes: Nodes, root: int, size: int) -> None:
    """Sort nodes by path probability, highest first; parents stay before children."""
    order = np.argsort(-nodes.path_probabilities[root:size], kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    nodes.rows[:, root:size] = nodes.rows[:, root:size][:, order]
    nodes.sources[root:size] = nodes.sources[root:size][order]
    nodes.hashes[root:size] = nodes.hashes[root:size][order]
    nodes.matches[root:size] = nodes.matches[root:size][order]
    nodes.parents[root + 1 : size] = places[nodes.parents[root + 1 : size] - root] + root
