"""Partition of a step's token tree into one share a replica.

A share is a set of leaves with all their ancestors; ancestors that several shares need are computed by each (the
paper's redundant tokens, section 3.4). The partition keeps the finishing time of the last replica as small as it can,
by what each of them needs for so many tokens: finding the least is NP-hard (it contains bin packing), so this is a
search for the least time under which a greedy packing fits. The inner loops are compiled by Numba.

Letters: T nodes in the tree, P pending tokens, R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.utils.jit import compiled, with_fresh_cache

TIME_UNIT = 1 << 20  # a token at speed 1


@dataclass(frozen=True)
class Share:
    """What one replica does in a step.

    Attributes:
        nodes: int64 indices into the tree of what it feeds, ascending: the P pending tokens first, then its leaves and
            their ancestors.
        owned: int64 indices into the tree of the nodes whose successors it reports, ascending. Every node from the root
            on is owned by exactly one replica.
    """

    nodes: np.ndarray
    owned: np.ndarray


class Shares(Sequence[Share]):
    """What everyone does in a step: the shares, by rank.

    Args:
        owner: [T] int64, the rank that owns each node; -1 for the pending tokens before the root.
        nodes, owned: int64, every share's, one behind the other.
        sizes, num_owned: [R] how many tokens each replica feeds, and how many nodes it owns.

    Attributes:
        owner, sizes, num_owned: these.
    """

    # Sizes are lists: numpy takes longer to add up a few numbers.
    def __init__(self, owner: np.ndarray, nodes: np.ndarray, owned: np.ndarray, sizes: list[int], num_owned: list[int]):
        self.owner, self.sizes, self.num_owned = owner, sizes, num_owned
        self._nodes, self._owned = nodes, owned

    @classmethod
    def of_one(cls, num_nodes: int, root: int) -> Shares:
        """Of a replica without peers."""
        nodes, owner = np.arange(num_nodes), np.zeros(num_nodes, np.int64)
        owner[:root] = -1
        return cls(owner, nodes, nodes[root:], [num_nodes], [num_nodes - root])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, rank: int) -> Share:
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        fed, owned = sum(self.sizes[:rank]), sum(self.num_owned[:rank])
        return Share(self._nodes[fed : fed + self.sizes[rank]], self._owned[owned : owned + self.num_owned[rank]])

    def digest(self) -> int:
        """56 bits that tell who owns what apart; 0 for one replica."""
        if len(self) == 1:
            return 0
        content = self.owner.tobytes() + repr(self.sizes).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


def linear_times(speeds: Sequence[float], num_tokens: int) -> np.ndarray:
    """[R, num_tokens + 1] int64 times of replicas that need the same for every token; > 0, only ratios matter."""
    fastest = max(speeds)
    return np.array([np.arange(num_tokens + 1) * (TIME_UNIT * fastest / speed) for speed in speeds]).astype(np.int64)


def partition(tree: TokenTree, speeds: Sequence[float]) -> Shares:
    """Cut the tree into R shares for replicas that do so many tokens per unit of time: see `partition_by_times`."""
    return partition_by_times(tree, linear_times(speeds, len(tree)))


def partition_by_times(
    tree: TokenTree, times: np.ndarray, limit: int | None = None, num_nodes: int | None = None
) -> Shares:
    """Cut the tree into R shares, balanced on what each replica computes, ancestors included.

    Args:
        tree: the step's tree.
        times: [R, >= T + 1] int64, how long each replica needs for 0, 1, 2 ... tokens, in one unit; must not fall.
        limit: tokens that a replica feeds at most; None for no limit. `largest_fit` says how many nodes that allows;
            of more of them some replica feeds more than the limit.
        num_nodes: to cut the tree of so many first nodes; by default of all.

    Returns:
        R shares. A replica without leaves feeds the pending tokens alone.
    """
    num_nodes = len(tree) if num_nodes is None else num_nodes
    if len(times) == 1:
        return Shares.of_one(num_nodes, tree.root)
    _, parents, depths = tree.arrays()
    most = num_nodes if limit is None else limit
    owner, nodes, owned, sizes, num_owned = _cut(parents, depths, tree.root, num_nodes, times, most)
    return Shares(owner, nodes, owned, sizes.tolist(), num_owned.tolist())


def largest_fit(tree: TokenTree, num_replicas: int, budget: int, num_nodes: int | None = None) -> int:
    """How many of the first nodes of a tree can be fed if no replica may feed more than `budget` tokens.

    Args:
        num_nodes: at most; by default all.
    """
    num_nodes = len(tree) if num_nodes is None else num_nodes
    if num_replicas == 1 or num_nodes <= budget:
        return min(num_nodes, max(budget, tree.root + 1))
    _, parents, depths = tree.arrays()
    return int(_largest_fit(parents, depths, tree.root, num_nodes, num_replicas, budget))


@functools.cache
def compile_partition() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""
    tree = TokenTree([0], max_depth=3)
    for branch in ([1, 2], [3]):
        tree.add_branch(branch)

    def use() -> None:
        partition(tree, [1.0, 1.0])
        largest_fit(tree, 2, 3)

    with_fresh_cache(use)


@compiled(makes_arrays=True)
def _leaves_deep_first(parents, depths, root, num_nodes):
    """The leaves in depth-first order, the deepest subtree first, each with the depth at which it leaves the last one.

    In this order neighbours share the most ancestors, and what is dear to share (the end of the window's level 0)
    comes while there is room.
    """
    height = depths[:num_nodes].copy()  # depth of the deepest node below
    num_children = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes - 1, root, -1):
        parent = parents[node]
        num_children[parent] += 1
        height[parent] = max(height[parent], height[node])
    firsts = np.cumsum(num_children) - num_children  # of each node's children in `children`
    ends = firsts.copy()
    children = np.empty(num_nodes, np.int64)
    for node in range(root + 1, num_nodes):
        parent = parents[node]
        at = ends[parent]
        ends[parent] += 1
        while at > firsts[parent] and height[children[at - 1]] > height[node]:  # sorted by height, stable
            children[at] = children[at - 1]
            at -= 1
        children[at] = node
    leaves = np.empty(num_nodes, np.int64)
    branches = np.empty(num_nodes, np.int64)
    stack = np.empty(num_nodes + 1, np.int64)
    stack[0] = root
    num_stacked, num_leaves, branch = 1, 0, 0
    while num_stacked:
        num_stacked -= 1
        node = stack[num_stacked]
        if firsts[node] == ends[node]:
            if node != root:
                leaves[num_leaves], branches[num_leaves] = node, branch
                num_leaves += 1
                if num_stacked:
                    branch = depths[stack[num_stacked - 1]] - 1
            continue
        for at in range(firsts[node], ends[node]):
            stack[num_stacked] = children[at]
            num_stacked += 1
    return leaves[:num_leaves], branches[:num_leaves]


@compiled(makes_arrays=True)
def _fits(leaves, branches, depths, room, bins):
    """Pack the leaves into bins of the given room, if they fit: `bins` is the bin of each.

    Each leaf goes where it adds the fewest nodes; among those, where the least room is left. What a leaf adds to a
    bin is its depth less the depth of its branching from the bin's last leaf, which in depth-first order is the one
    it shares the most with.
    """
    left = room.copy()
    shared = np.zeros(len(room), np.int64)  # depth down to which the current leaf's ancestors are in the bin
    for i in range(len(leaves)):
        depth, branch = depths[leaves[i]], branches[i]
        best, best_added, best_left = -1, depth + 1, 0
        for rank in range(len(room)):
            if shared[rank] > branch:
                shared[rank] = branch
            added = depth - shared[rank]
            if added <= left[rank] and (added < best_added or (added == best_added and left[rank] < best_left)):
                best, best_added, best_left = rank, added, left[rank]
        if best < 0:
            return False
        bins[i] = best
        left[best] -= best_added
        shared[best] = depth
    return True


@compiled(makes_arrays=True)
def _listed(fed, owner, sizes):
    """What `_cut` returns, of who feeds what, [R, T] bool, who owns it, and how much each feeds."""
    num_replicas, num_nodes = fed.shape
    nodes, owned = np.empty(sizes.sum(), np.int64), np.empty(num_nodes, np.int64)
    num_owned = np.zeros(num_replicas, np.int64)
    num_fed, num_listed = 0, 0
    for rank in range(num_replicas):
        for node in range(num_nodes):
            if fed[rank, node]:
                nodes[num_fed] = node
                num_fed += 1
                if owner[node] == rank:
                    owned[num_listed] = node
                    num_listed += 1
                    num_owned[rank] += 1
    return owner, nodes, owned, sizes, num_owned


@compiled(makes_arrays=True)
def _cut(parents, depths, root, num_nodes, times, limit):
    """The shares under the least time that `_fits` finds, as Shares takes them, but for arrays of sizes."""
    num_replicas = len(times)
    most = min(limit, times.shape[1] - 1)
    num_pending = root + 1
    fed = np.zeros((num_replicas, num_nodes), np.bool_)
    fed[:, :num_pending] = True
    owner = np.full(num_nodes, -1, np.int64)
    owner[root] = 0
    sizes = np.full(num_replicas, num_pending, np.int64)
    leaves, branches = _leaves_deep_first(parents, depths, root, num_nodes)
    # No packing can beat the pending tokens everywhere, nor the deepest leaf on the replica that is fastest with it.
    time = times[:, num_pending].max()
    if len(leaves) == 0:
        return _listed(fed, owner, sizes)
    deepest = 0
    for leaf in leaves:
        deepest = max(deepest, depths[leaf])
    time = max(time, times[:, num_pending + deepest].min())
    room = np.zeros(num_replicas, np.int64)
    bins = np.empty(len(leaves), np.int64)
    while True:
        for rank in range(num_replicas):
            while room[rank] < most - num_pending and times[rank, num_pending + room[rank] + 1] <= time:
                room[rank] += 1
        if room.sum() >= num_nodes - num_pending and _fits(leaves, branches, depths, room, bins):
            break
        # what fits only changes where one more token fits
        later = np.int64(-1)
        for rank in range(num_replicas):
            tokens = room[rank] + num_pending + 1
            if tokens <= most and (later < 0 or times[rank, tokens] < later):
                later = times[rank, tokens]
        if later >= 0:
            time = later
        elif most < times.shape[1] - 1:
            # The packing is greedy: it may miss a fit that is there, and then does without the limit.
            most = times.shape[1] - 1
        else:  # nobody knows how long so many take
            room[:] = num_nodes
            _fits(leaves, branches, depths, room, bins)
            break
    for i in range(len(leaves)):
        node, rank = leaves[i], bins[i]
        while not fed[rank, node]:
            fed[rank, node] = True
            sizes[rank] += 1
            if owner[node] < 0:
                owner[node] = rank
            node = parents[node]
    return _listed(fed, owner, sizes)


@compiled(makes_arrays=True)
def _largest_fit(parents, depths, root, num_nodes, num_replicas, budget):
    """The largest number of first nodes that a bisection finds to fit, all of them first."""
    room = np.full(num_replicas, budget - root - 1, np.int64)
    low, high = min(num_nodes, max(root + 1, budget)), num_nodes
    bins = np.empty(num_nodes, np.int64)
    middle = high
    while low < high:
        leaves, branches = _leaves_deep_first(parents, depths, root, middle)
        if _fits(leaves, branches, depths, room, bins):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
