"""Chains of replicas: the nodes that each replica feeds, its state after a step, and catching up."""

import random

import numpy as np
import pytest
from support.learned import confirmed_costs

from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sizing.chain_budget import MAX_REFED, ChainBudget

MAX_TOKENS = 60


def tree_of(pending: int, branches: list[list[int]], probability: float = 0.5) -> TokenTree:
    """Return a tree whose path probabilities fall by a constant factor with each depth."""
    grown = TokenTree(range(pending), max_depth=20)
    for branch in branches:
        grown.add_branch(branch)
    depths = np.maximum(np.array(grown.depths), 0)
    probabilities = ((1 << PATH_PROBABILITY_BITS) * probability**depths).astype(np.int64)
    return TokenTree.from_arrays(*grown.arrays(), probabilities, grown.root, 20)


def times(num_replicas: int, first: int = 1000, each: int = 10) -> np.ndarray:
    return np.tile(first + each * np.arange(MAX_TOKENS + 1), (num_replicas, 1)).astype(np.int64)


def budget_of(num_replicas: int, is_auto: bool = False, limit: int = 20, each: int = 10) -> ChainBudget:
    measured = times(num_replicas, each=each)
    return ChainBudget(measured, is_auto, limit, confirmed_costs(measured))


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_every_replica_continues_from_its_state(num_replicas, is_auto):
    rng = random.Random(num_replicas)
    budget = budget_of(num_replicas, is_auto)
    total, cached = 10, 9  # tokens of the sequence, tokens that all replicas hold
    held = [cached] * num_replicas
    for _ in range(200):
        tree = tree_of(total - cached, [[rng.randrange(3) for _ in range(6)] for _ in range(4)])
        tree = tree.part(budget.choose(tree))
        shares = budget.shares(tree)
        assert sorted(np.concatenate([share.owned for share in shares])) == list(range(tree.root, len(tree)))
        for rank, share in enumerate(shares):
            nodes = share.nodes.tolist()
            assert cached + nodes[0] == held[rank]
            assert tree.root in nodes and len(nodes) <= max(20, tree.root + 1 if num_replicas > 1 else 0)
            assert [tree.parents[node] for node in nodes[1:]] == nodes[:-1]  # exactly one path
            assert set(share.owned.tolist()) <= set(nodes)
        path = [tree.root]
        while children := [node for node in range(len(tree)) if tree.parents[node] == path[-1] and node > tree.root]:
            if rng.random() < 0.3:
                break
            path.append(rng.choice(children))
        held = [cached + int(share.nodes[0]) + (len(share.nodes) if share.nodes[-1] in path else 0) for share in shares]
        budget.end_step()
        budget.observe(tree, shares, [1000] * num_replicas, [100] * num_replicas, path[1:])
        cached += budget.settle(shares, path, tree.root + 1)
        total += len(path)
        assert cached == min(held)
        assert total - cached <= MAX_REFED + 7


def test_two_replicas_follow_two_paths():
    budget = budget_of(2)
    tree = tree_of(1, [[1, 2, 3], [4, 5]])
    shares = budget.shares(tree.part(budget.choose(tree)))
    assert [share.nodes.tolist() for share in shares] == [[0, 1, 2, 3], [0, 4, 5]]
    assert budget.settle(shares, [0, 4, 5], 1) == 0  # the second replica holds its chain, the first nothing new
    tree = tree_of(4, [[7, 8]])
    shares = budget.shares(tree.part(budget.choose(tree)))
    assert sorted(int(share.nodes[0]) for share in shares) == [0, 3]


def test_replica_catches_up_when_cheaper_than_feeding_tokens_again():
    def steps_until_caught_up(each: int) -> int:
        budget, num_pending = budget_of(1, each=each), 1
        for step in range(1, 100):
            tree = tree_of(num_pending, [[1, 2, 3]])
            tree = tree.part(budget.choose(tree))
            shares = budget.shares(tree)
            if len(tree) == num_pending:
                assert budget.settle(shares, [tree.root], num_pending) == num_pending
                return step
            assert budget.settle(shares, [tree.root], num_pending) == 0
            num_pending += 1
        raise AssertionError("never")

    assert steps_until_caught_up(each=500) < steps_until_caught_up(each=10) <= MAX_REFED + 1


def test_budget_of_one_token_feeds_only_root():
    budget = budget_of(1, limit=1)
    tree = tree_of(1, [[1, 2]])
    assert budget.choose(tree).tolist() == [0]


def test_chains_that_do_not_pay_are_not_fed():
    budget = budget_of(2, is_auto=True, each=5000)
    tree = tree_of(1, [[1, 2, 3], [4, 5]], probability=0.05)
    assert budget.choose(tree).tolist() == [0]
