"""Compiled part of the partition: packs a tree's leaves into one bin per replica.

Finding the best packing is NP-hard (it contains bin packing), so `cut` searches for the shortest time for which a
greedy packing fits.

Letters: T nodes in the tree, P pending tokens, R replicas, L leaves, M largest number of tokens with a known time.

Arguments that several functions share:
    parents: [T] index of each node's parent.
    depths: [T] depth of each node below the root, whose index is root.
    leaves, branches: [L] from `leaves_deep_first`.
    times: [R, M + 1] time of each replica for 0, 1, 2 ... tokens; see `partition_by_times`.
    limit: largest number of tokens that a replica feeds, ignored if no packing within it is found.
    owner: [T] rank that owns each node, or -1.
    feeds: [R, T] bool, whether each replica feeds each node.
    sizes: [R] number of tokens that each replica feeds.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.utils.jit import compiled, inlined


@inlined(makes_arrays=True)
def leaves_deep_first(parents, depths, root):
    """Return the tree's leaves in depth-first order, the deepest subtree first.

    Neighbours in this order share the most ancestors. Leaves with many ancestors (the end of the window's level 0) come
    first, while every replica has capacity. Returns ([L] leaves, [L] depth of the last ancestor that each leaf shares
    with the previous leaf).
    """
    num_nodes = len(parents)
    height = depths.copy()  # depth of the deepest node in each node's subtree
    num_children = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes - 1, root, -1):
        parent = parents[node]
        num_children[parent] += 1
        height[parent] = max(height[parent], height[node])
    firsts = np.cumsum(num_children) - num_children  # where each node's children begin in `children`
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
def fits(leaves, branches, depths, capacity, bins):
    """Pack the leaves greedily into bins, and return whether all of them fit.

    Each leaf goes into the bin where it adds the fewest nodes; on a tie, into the one with the least capacity left. A
    leaf adds the nodes below the last ancestor that it shares with the bin's last leaf: in depth-first order no other
    leaf of the bin shares more with it.

    `capacity` is the number of nodes below the root that fit into each bin, [R]. The bin of each leaf is written to
    `bins`, [L].
    """
    left = capacity.copy()
    shared = np.zeros(len(capacity), np.int64)  # depth down to which the current leaf's ancestors are in the bin
    for i in range(len(leaves)):
        depth, branch = depths[leaves[i]], branches[i]
        best, best_added, best_left = -1, depth + 1, 0
        for rank in range(len(capacity)):
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


@compiled
def _next_time(times, capacity, num_pending, max_tokens):
    """Return the shortest time in which any replica can feed one token more than now; -1 if none may.

    Replicas feed `capacity` tokens, [R], in addition to the pending ones, and `max_tokens` at most with those.
    """
    next_time = np.int64(-1)
    for rank in range(len(times)):
        num_tokens = capacity[rank] + num_pending + 1
        if num_tokens <= max_tokens and (next_time < 0 or times[rank, num_tokens] < next_time):
            next_time = times[rank, num_tokens]
    return next_time


@compiled(makes_arrays=True)
def _pack(leaves, branches, depths, num_pending, times, limit, bins):
    """Pack L >= 1 leaves for the shortest time at which `fits` finds a packing; write ranks to `bins`."""
    num_replicas, num_nodes = len(times), len(depths)
    max_tokens = min(limit, times.shape[1] - 1)
    # Lower bound: every replica feeds the pending tokens, and some replica also feeds the deepest leaf's path.
    deepest = 0
    for leaf in leaves:
        deepest = max(deepest, depths[leaf])
    time = max(times[:, num_pending].max(), times[:, num_pending + deepest].min())
    capacity = np.zeros(num_replicas, np.int64)
    while True:
        for rank in range(num_replicas):
            while capacity[rank] < max_tokens - num_pending and times[rank, num_pending + capacity[rank] + 1] <= time:
                capacity[rank] += 1
        if capacity.sum() >= num_nodes - num_pending and fits(leaves, branches, depths, capacity, bins):
            return
        # the packing can only change once some replica may feed one more token
        next_time = _next_time(times, capacity, num_pending, max_tokens)
        if next_time >= 0:
            time = next_time
        elif max_tokens < times.shape[1] - 1:
            # Try again without the limit: the greedy packing may have missed a fit.
            max_tokens = times.shape[1] - 1
        else:  # more tokens than any time is known for: pack without regard to time
            capacity[:] = num_nodes
            fits(leaves, branches, depths, capacity, bins)
            return


@inlined
def feed_leaves(leaves, bins, parents, owner, feeds, sizes):
    """Assign each leaf, with all its ancestors, to its bin; updates `owner`, `feeds` and `sizes`.

    `feeds` must be true for the pending tokens. The first replica that feeds a node without an owner owns it.
    """
    for i in range(len(leaves)):
        node, rank = leaves[i], bins[i]
        while not feeds[rank, node]:
            feeds[rank, node] = True
            sizes[rank] += 1
            if owner[node] < 0:
                owner[node] = rank
            node = parents[node]


@inlined(makes_arrays=True)
def list_nodes(feeds, owner, sizes):
    """Return (nodes, owned, num_owned): nodes that each replica feeds, and owns, by rank; see `Shares`."""
    num_replicas, num_nodes = feeds.shape
    nodes, owned = np.empty(sizes.sum(), np.int64), np.empty(num_nodes, np.int64)
    num_owned = np.zeros(num_replicas, np.int64)
    num_fed, num_listed = 0, 0
    for rank in range(num_replicas):
        for node in range(num_nodes):
            if feeds[rank, node]:
                nodes[num_fed] = node
                num_fed += 1
                if owner[node] == rank:
                    owned[num_listed] = node
                    num_listed += 1
                    num_owned[rank] += 1
    return nodes, owned[:num_listed], num_owned


@compiled(makes_arrays=True)
def cut(parents, depths, root, times, limit):
    """Return the arguments of `Shares` for the shortest time in which `_pack` finds a packing."""
    num_replicas, num_nodes, num_pending = len(times), len(parents), root + 1
    feeds = np.zeros((num_replicas, num_nodes), np.bool_)
    feeds[:, :num_pending] = True
    owner = np.full(num_nodes, -1, np.int64)
    owner[root] = 0
    sizes = np.full(num_replicas, num_pending, np.int64)
    leaves, branches = leaves_deep_first(parents, depths, root)
    bins = np.empty(len(leaves), np.int64)
    if len(leaves):
        _pack(leaves, branches, depths, num_pending, times, limit, bins)
    feed_leaves(leaves, bins, parents, owner, feeds, sizes)
    nodes, owned, num_owned = list_nodes(feeds, owner, sizes)
    return owner, nodes, owned, sizes, num_owned
