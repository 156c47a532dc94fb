"""Partition of a step's token tree into one share a replica.

A share is a set of leaves with all their ancestors; ancestors that several shares need are computed by each (the
paper's redundant tokens, section 3.4). The work of a share is the number of tokens it feeds, and the partition keeps
the finishing time of the busiest replica, work / speed, as small as it can: finding the least is NP-hard (it contains
bin packing), so this is a search for the least cap under which a greedy packing fits.

Letters: T nodes in the tree, P pending tokens, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lp_runtime.lookahead.tree import TokenTree


@dataclass(frozen=True)
class Share:
    """What one replica does in a step.

    Attributes:
        nodes: indices into the tree of what it feeds, ascending: the P pending tokens first, then its leaves and
            their ancestors.
        owned: indices into the tree of the nodes whose successors it reports, ascending. Every node from the root
            on is owned by exactly one replica.
    """

    nodes: list[int]
    owned: list[int]


def partition(tree: TokenTree, speeds: Sequence[float]) -> list[Share]:
    """Cut the tree into R shares, balanced on what each replica computes, ancestors included.

    Args:
        tree: the step's tree.
        speeds: [R] tokens per unit of time of each replica, > 0; only their ratios matter.

    Returns:
        [R] shares. A replica without leaves feeds the pending tokens alone.
    """
    if len(speeds) == 1:
        nodes = list(range(len(tree)))
        return [Share(nodes, nodes[tree.root :])]
    bins = _pack(tree, speeds)
    owner = [-1] * len(tree)
    owner[tree.root] = 0
    shares = []
    for rank, leaves in enumerate(bins):
        member = set(range(tree.root + 1))
        owned = [tree.root] if rank == 0 else []
        for leaf in leaves:
            node = leaf
            while node not in member:
                member.add(node)
                if owner[node] < 0:
                    owner[node] = rank
                    owned.append(node)
                node = tree.parents[node]
        shares.append(Share(sorted(member), sorted(owned)))
    return shares


def _pack(tree: TokenTree, speeds: Sequence[float]) -> list[list[int]]:
    """[R] lists of leaves: the packing with the least cap on time that `_fits` finds."""
    leaves = _leaves_deep_first(tree)
    if not leaves:
        return [[] for _ in speeds]
    num_pending = tree.root + 1
    fastest = max(speeds)
    # No packing can beat the deepest leaf on the fastest replica, nor all nodes shared out without redundancy. The
    # capacities only change where time * speed passes a whole number, so times are tried at those steps.
    deepest = max(tree.depths[leaf] for leaf, _ in leaves)
    num_nodes = len(tree) - num_pending
    low = (num_pending + deepest) / fastest
    low = max(low, (num_nodes + num_pending * len(speeds)) / sum(speeds))
    while True:
        room = [int(low * speed + 1e-9) - num_pending for speed in speeds]
        bins = _fits(leaves, tree.depths, room)
        if bins is not None:
            return bins
        low = min((int(low * speed + 1e-9) + 1) / speed for speed in speeds)


def _leaves_deep_first(tree: TokenTree) -> list[tuple[int, int]]:
    """The leaves in depth-first order, the deepest subtree first, each with the depth at which it leaves the last one.

    In this order neighbours share the most ancestors, and what is dear to share (the end of the window's level 0)
    comes while there is room.
    """
    children: list[list[int]] = [[] for _ in range(len(tree))]
    height = list(tree.depths)  # depth of the deepest node below
    for node in range(len(tree) - 1, tree.root, -1):
        parent = tree.parents[node]
        children[parent].append(node)
        if height[node] > height[parent]:
            height[parent] = height[node]
    leaves: list[tuple[int, int]] = []
    stack = [tree.root]
    branch_depth = 0
    while stack:
        node = stack.pop()
        below = children[node]
        if not below:
            if node != tree.root:
                leaves.append((node, branch_depth))
                if stack:
                    branch_depth = tree.depths[stack[-1]] - 1
            continue
        if len(below) > 1:
            below.sort(key=height.__getitem__)
        stack += below
    return leaves


def _fits(leaves: list[tuple[int, int]], depths: Sequence[int], room: Sequence[int]) -> list[list[int]] | None:
    """Pack the leaves into bins of the given room, or None.

    Each leaf goes where it adds the fewest nodes; among those, where the least room is left. What a leaf adds to a
    bin is its depth less the depth of its branching from the bin's last leaf, which in depth-first order is the one
    it shares the most with.
    """
    left = list(room)
    bins: list[list[int]] = [[] for _ in room]
    shared = [0] * len(room)  # depth down to which the current leaf's ancestors are in the bin
    for leaf, branch_depth in leaves:
        depth = depths[leaf]
        best, best_key = -1, (depth + 1, 0)
        for rank, have in enumerate(shared):
            if have > branch_depth:
                shared[rank] = have = branch_depth
            added = depth - have
            if added <= left[rank] and (key := (added, left[rank])) < best_key:
                best, best_key = rank, key
        if best < 0:
            return None
        bins[best].append(leaf)
        left[best] -= best_key[0]
        shared[best] = depth
    return bins


def step_tokens(shares: Sequence[Share]) -> float:
    """Tokens fed in a step, mean over the replicas."""
    return sum(len(share.nodes) for share in shares) / len(shares)
