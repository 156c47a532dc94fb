"""Chains of a token tree: one path for each replica, for models that are fed nothing but text.

Letters: T nodes in the tree, C chains.
"""

from __future__ import annotations

import functools

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import compiled, with_fresh_cache


def heaviest_chains(tree: TokenTree, weights: np.ndarray, num_chains: int) -> list[np.ndarray]:
    """Return the paths below the root that together hold the most weight.

    A tree falls apart into paths that follow, from each node, the child with the heaviest path below. The heaviest
    C of them, each with its ancestors, are the best C paths.

    Args:
        tree: the tree.
        weights: [T] int64 weight of each node, >= 0, not of the root; a node that several paths share counts once.
        num_chains: C.

    Returns:
        at most C paths, the heaviest first: int64 nodes from below the root to a leaf.
    """
    parents = tree.arrays()[1]
    chains = []
    for leaf in heaviest_leaves(parents, weights, tree.root, len(tree), num_chains).tolist():
        chain = [leaf]
        while (above := int(parents[chain[-1]])) != tree.root:
            chain.append(above)
        chains.append(np.array(chain[::-1], np.int64))
    return chains


@compiled(makes_arrays=True)
def heaviest_leaves(parents, weights, root, num_nodes, num_chains):
    """Return [C] int64 leaves of the paths of `heaviest_chains`, or fewer where the tree has fewer leaves.

    Args:
        parents: [T] int64 index of each node's parent.
        weights: [T] int64.
        root: index of the root.
        num_nodes: T.
        num_chains: C.
    """
    below = np.zeros(num_nodes, np.int64)  # weight of the heaviest path below each node
    heavy = np.full(num_nodes, -1, np.int64)  # the child where that path begins
    for node in range(num_nodes - 1, root, -1):
        parent, weight = parents[node], weights[node] + below[node]
        if heavy[parent] < 0 or weight >= below[parent]:
            below[parent], heavy[parent] = weight, node
    leaves = np.empty(num_chains, np.int64)
    num_leaves = 0
    last_weight, last_top = np.int64(1) << 62, np.int64(-1)
    while num_leaves < num_chains:
        top, top_weight = np.int64(-1), np.int64(-1)
        for node in range(root + 1, num_nodes):  # where a path begins: at the root, or beside a heavier child
            if parents[node] != root and heavy[parents[node]] == node:
                continue
            weight = weights[node] + below[node]
            is_next = weight < last_weight or (weight == last_weight and node > last_top)
            if is_next and weight > top_weight:
                top, top_weight = node, weight
        if top < 0:
            break
        last_weight, last_top = top_weight, top
        while heavy[top] >= 0:
            top = heavy[top]
        leaves[num_leaves] = top
        num_leaves += 1
    return leaves[:num_leaves]


@functools.cache
def compile_chains() -> None:
    """Compile this module's Numba code, or load it from the cache on disk; once a process."""
    tree = TokenTree([0], max_depth=2)
    tree.add_branch([1])
    with_fresh_cache(lambda: heaviest_chains(tree, np.ones(2, np.int64), 1))
