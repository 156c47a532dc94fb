"""Chains of a tree: the paths that together have the most weight."""

import itertools
import random

import numpy as np
import pytest
from support.thinned import thinned

from lp_runtime.distributed.partition.chains import heaviest_chains
from lp_runtime.lookahead.tree import TokenTree


def random_tree(seed: int) -> tuple[TokenTree, np.ndarray]:
    """Return a tree of up to 14 nodes, with up to three pending tokens, and weights of its nodes.

    Weights do not grow from parent to child.
    """
    rng = random.Random(seed)
    tree = TokenTree([0] * rng.randrange(1, 4), max_depth=9)
    weights = [0] * (tree.root + 1)
    for _ in range(rng.randrange(12)):
        parent = rng.randrange(tree.root, len(tree))
        node = tree.add(parent, rng.randrange(5))
        if node == len(weights):
            limit = 1000 if parent == tree.root else weights[parent]
            weights.append(rng.randrange(limit + 1))
    return tree, np.array(weights, np.int64)


def paths_to_leaves(tree: TokenTree) -> list[list[int]]:
    paths = []
    for leaf in set(range(tree.root + 1, len(tree))) - set(tree.parents):
        path = [leaf]
        while tree.parents[path[-1]] != tree.root:
            path.append(tree.parents[path[-1]])
        paths.append(path[::-1])
    return paths


@pytest.mark.parametrize(("seed", "num_chains"), thinned(8, range(40), [1, 2, 3, 5]))
def test_heaviest_chains_have_the_maximum_weight(seed, num_chains):
    tree, weights = random_tree(seed)
    chains = [chain.tolist() for chain in heaviest_chains(tree, weights, num_chains)]
    paths = paths_to_leaves(tree)
    assert all(chain in paths for chain in chains)
    assert len(chains) == len({chain[-1] for chain in chains}) == min(num_chains, len(paths))
    held = weights[list(set(itertools.chain(*chains)))].sum()
    best = max(
        (weights[list(set(itertools.chain(*some)))].sum() for some in itertools.combinations(paths, len(chains))),
        default=0,
    )
    assert held == best


def test_heaviest_chain_is_first():
    tree = TokenTree([7], max_depth=3)
    light, heavy = tree.add_branch([1, 2]), tree.add_branch([3])
    weights = np.zeros(len(tree), np.int64)
    weights[light], weights[heavy] = [5, 2], [9]
    assert [chain.tolist() for chain in heaviest_chains(tree, weights, 2)] == [heavy, light]
