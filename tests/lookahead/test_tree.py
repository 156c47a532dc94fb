"""The token tree: adding nodes, parts and truncated trees, and acceptance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lp_runtime.lookahead.tree import TokenTree, accept

BRANCHES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8)


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Return the tokens from below the root down to `node`."""
    tokens = []
    while node != tree.root:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def test_pending_tokens_form_chain_that_ends_at_root():
    tree = TokenTree([7, 8, 9], max_depth=5)
    assert tree.tokens == [7, 8, 9]
    assert tree.parents == [-1, 0, 1]
    assert tree.depths == [-2, -1, 0]
    assert tree.root == 2
    assert len(tree) == 3


def test_equal_tokens_merge_only_under_same_parent():
    tree = TokenTree([7], max_depth=5)
    first = tree.add_branch([1, 2, 3])
    second = tree.add_branch([1, 2, 4])
    third = tree.add_branch([2, 1])
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not set(third) & set(first)
    assert len(tree) == 1 + 3 + 1 + 2
    assert tree.add(tree.root, 1) == first[0]
    assert tree.child(first[0], 2) == first[1]
    assert tree.child(first[0], 9) is None


def test_nodes_below_max_depth_are_not_added():
    tree = TokenTree([7], max_depth=2)
    nodes = tree.add_branch([1, 2, 3, 4])
    assert [tree.depths[node] for node in nodes] == [1, 2]
    assert tree.add(nodes[-1], 3) is None
    assert len(tree) == 3
    assert TokenTree([7], max_depth=0).add_branch([1]) == []


@given(BRANCHES, st.integers(0, 4), st.integers(1, 3))
def test_tree_is_prefix_closure_of_its_branches(branches, max_depth, num_pending):
    tree = TokenTree([9] * num_pending, max_depth)
    for branch in branches:
        nodes = tree.add_branch(branch)
        assert [tree.tokens[node] for node in nodes] == branch[:max_depth]
    prefixes = {tuple(b[:length]) for b in branches for length in range(1, min(len(b), max_depth) + 1)}
    below = range(tree.root + 1, len(tree))
    assert {tuple(path_to(tree, node)) for node in below} == prefixes
    assert len(below) == len(prefixes)
    for node in below:
        parent = tree.parents[node]
        assert tree.root <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1 == len(path_to(tree, node))


def test_part_has_the_tokens_depths_and_probabilities_of_its_nodes():
    tree = TokenTree([7, 8], max_depth=5)
    tree.add_branch([1, 2, 3])
    tree.add_branch([4, 5])
    tree.path_probabilities = np.arange(100, 107)
    part = tree.part(np.array([0, 1, 2, 5, 6]))
    assert (part.tokens, part.root) == ([7, 8, 1, 4, 5], 1)
    assert (part.parents, part.depths) == ([-1, 0, 1, 1, 3], [-1, 0, 1, 1, 2])
    assert part.path_probabilities.tolist() == [100, 101, 102, 105, 106]


def test_accept_ends_at_the_last_node_of_a_truncated_tree():
    tree = TokenTree([5], max_depth=4)
    tree.add_branch([1, 2, 3])
    tree.truncate(2)
    assert accept(tree, [1, 2]) == ([1, 2], [1])


def test_accept_returns_only_bonus_token_if_no_guess_matches():
    tree = TokenTree([5, 6], max_depth=4)
    tree.add_branch([1, 2])
    assert accept(tree, [-1, 3, 0, 0]) == ([3], [])


def test_accept_keeps_bonus_token_after_full_match():
    tree = TokenTree([5], max_depth=4)
    nodes = tree.add_branch([1, 2, 3])
    assert accept(tree, [1, 2, 3, 4]) == ([1, 2, 3, 4], nodes)


def test_accept_follows_shared_nodes_from_one_branch_into_another():
    tree = TokenTree([5], max_depth=9)
    window = [tree.root, tree.add(tree.root, 1)]
    window.append(tree.add(window[1], 2))
    guess = tree.add_branch([1, 3, 4])
    successors = [0] * len(tree)
    successors[tree.root], successors[guess[0]], successors[guess[1]], successors[guess[2]] = 1, 3, 4, 8
    assert guess[0] == window[1]
    assert accept(tree, successors) == ([1, 3, 4, 8], guess)


@given(BRANCHES, st.lists(st.integers(0, 2), min_size=41, max_size=41))
def test_accept_returns_longest_path_that_matches_successors(branches, successors):
    tree = TokenTree([9], max_depth=5)
    for branch in branches:
        tree.add_branch(branch)
    run, path = accept(tree, successors)
    assert [tree.tokens[node] for node in path] == run[:-1]
    assert [tree.parents[node] for node in path] == [tree.root, *path][:-1]
    last = path[-1] if path else tree.root
    assert [successors[node] for node in [tree.root, *path]] == run
    assert tree.child(last, run[-1]) is None
