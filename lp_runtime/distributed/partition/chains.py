"""Chains of a token tree of T nodes: one path per replica, for models that take plain text, not trees."""

from __future__ import annotations

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import compiled, compiles, inlined


def heaviest_chains(tree: TokenTree, weights: np.ndarray, num_chains: int) -> list[np.ndarray]:
    """Return the C = num_chains paths below the root with the largest total weight, the heaviest first.

    The tree decomposes into paths that continue, at each node, to the child with the heaviest path below it. The C
    heaviest of them, each extended by its ancestors, are the best C paths. They are int64 node indices from a child of
    the root to a leaf. Weights are [T] int64, >= 0; the root's is ignored, and a node that paths share counts once.
    """
    parents = tree.arrays()[1]
    chains = []
    for leaf in heaviest_leaves(parents, weights, tree.root, num_chains).tolist():
        chain = [leaf]
        while (above := int(parents[chain[-1]])) != tree.root:
            chain.append(above)
        chains.append(np.array(chain[::-1], np.int64))
    return chains


@compiled(makes_arrays=True)
def heaviest_leaves(parents, weights, root, num_chains):
    """Return the leaves of the `heaviest_chains` paths: [C] int64, fewer if the tree has fewer leaves."""
    num_nodes = len(parents)
    totals = weights[:num_nodes].copy()  # weight of the heaviest path from each node down
    heavy = np.full(num_nodes, -1, np.int64)  # the next node on that path
    for node in range(num_nodes - 1, root, -1):
        parent = parents[node]
        if heavy[parent] < 0 or totals[node] >= totals[heavy[parent]]:
            heavy[parent] = node
        if node == heavy[parent] and parent > root:
            totals[parent] = weights[parent] + totals[node]
    leaves = np.empty(num_chains, np.int64)
    for chain in range(num_chains):
        top = _heaviest_top(parents, totals, heavy, root, num_nodes)
        if top < 0:
            return leaves[:chain]
        totals[top] = -1  # taken
        while heavy[top] >= 0:
            top = heavy[top]
        leaves[chain] = top
    return leaves


@inlined
def _heaviest_top(parents, totals, heavy, root, num_nodes):
    """Return the first node of the heaviest path not taken yet; -1 if there is none.

    A path begins at a child of the root, or at a child that is not the heaviest of its parent.
    """
    best = -1
    for node in range(root + 1, num_nodes):
        is_top = parents[node] == root or heavy[parents[node]] != node
        if is_top and totals[node] >= 0 and (best < 0 or totals[node] > totals[best]):
            best = node
    return best


@compiles
def compile_chains() -> None:
    tree = TokenTree([0], max_depth=2)
    tree.add_branch([1])
    heaviest_chains(tree, np.ones(2, np.int64), 1)
