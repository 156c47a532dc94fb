"""Fills replicas of limited capacity with a tree's nodes, the likeliest first. Compiled.

If the whole tree fits, all of it is fed. Otherwise the longest beginning that fits is packed, leaf by leaf. Then each
further node, in the tree's order (the most promising first), goes to the replica where it adds the fewest nodes, and
nodes that fit nowhere are left out. Packing the chosen nodes again frees capacity for a few more.

Letters: T nodes in the tree, R replicas.

Arguments that several functions share:
    parents: [T] index of each node's parent.
    depths: [T] depth of each node below the root, whose index is root.
    capacity: [R] nodes that each replica may feed in addition to the pending ones.
    owner: [T] rank that owns each node; -1 for nodes that are left out or come before the root.
    feeds: [R, T] bool, whether each replica feeds each node.
    left: [R] nodes that each replica may still feed.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.distributed.partition.bin_packing import feed_leaves, fits, leaves_deep_first, list_nodes
from lp_runtime.utils.jit import compiled, inlined

NUM_TRIES = 4  # to find the longest beginning of a tree that fits; a fifth one fits 1% more nodes on 8 replicas


@inlined
def _cheapest(parents, parent, feeds, left):
    """Find the replica where a child of `parent` adds the fewest nodes: itself and unfed ancestors.

    Returns (rank, number of nodes added there); a tie goes to the replica with the most capacity left. The rank is -1,
    and the number meaningless, if the node fits nowhere.
    """
    best, best_added = -1, len(parents)
    for rank in range(len(left)):
        added, ancestor, most = 1, parent, min(left[rank], best_added)
        while added <= most and not feeds[rank, ancestor]:
            added, ancestor = added + 1, parents[ancestor]
        if added < best_added and added <= most or added == best_added <= most and left[rank] > left[best]:
            best, best_added = rank, added
    return best, best_added


@inlined(makes_arrays=True)
def feed_pending(root, owner, feeds):
    """Reset `owner` and `feeds`: all replicas feed only the pending tokens, and rank 0 owns the root."""
    feeds[:, : root + 1] = True
    feeds[:, root + 1 :] = False
    owner[:] = -1
    owner[root] = 0


@inlined(makes_arrays=True)
def fill(parents, root, owner, feeds, left):
    """Assign nodes without an owner to replicas, in the tree's order; return how many were assigned."""
    total, num_assigned = left.sum(), np.int64(0)
    for node in range(root + 1, len(parents)):
        if total <= 0:
            break
        if owner[node] < 0 and owner[parents[node]] >= 0:
            rank, num_added = _cheapest(parents, parents[node], feeds, left)
            if rank >= 0:
                owner[node] = rank
                num_assigned += 1
                left[rank] -= num_added
                total -= num_added
                ancestor = np.int64(node)
                while not feeds[rank, ancestor]:
                    feeds[rank, ancestor] = True
                    ancestor = parents[ancestor]
    return num_assigned


@inlined(makes_arrays=True)
def _pack(parents, depths, root, nodes, capacity, owner, feeds, left):
    """Pack a subset of the nodes tightly; return whether it fits. If not, nothing changes.

    `nodes` are ascending indices that include all pending tokens, and the parent of every other node among them.
    """
    if capacity.sum() < len(nodes) - root - 1:
        return False
    places = np.full(len(parents) + 1, -1, np.int64)  # one more: index -1 is the parent of the first token
    for place in range(len(nodes)):
        places[nodes[place]] = place
    leaves, branches = leaves_deep_first(places[parents[nodes]], depths[nodes], root)
    bins = np.empty(len(leaves), np.int64)
    if not fits(leaves, branches, depths[nodes], capacity, bins):
        return False
    feed_pending(root, owner, feeds)
    num_fed = np.zeros(len(capacity), np.int64)
    feed_leaves(nodes[leaves], bins, parents, owner, feeds, num_fed)
    for rank in range(len(left)):
        left[rank] = capacity[rank] - num_fed[rank]
    return True


@inlined(makes_arrays=True)
def _pack_beginning(parents, depths, root, capacity, owner, feeds, left):
    """Pack about as many of the tree's first nodes as fit; return how many nodes have been packed."""
    feed_pending(root, owner, feeds)
    nodes = np.arange(len(parents))
    num_packed, most = root + 1, min(len(parents), root + 1 + capacity.sum())
    size = most
    for _ in range(NUM_TRIES):
        if _pack(parents, depths, root, nodes[:size], capacity, owner, feeds, left):
            num_packed = size
        else:
            most = size - 1
        if num_packed == most:
            break
        size = num_packed + (2 * (most - num_packed) + 2) // 3  # most of a tree fits
    return num_packed


@inlined(makes_arrays=True)
def _chosen(owner, root):
    """Return the nodes that have an owner, and the pending tokens: [m] ascending."""
    return np.flatnonzero((owner >= 0) | (np.arange(len(owner)) < root))


@compiled(makes_arrays=True)
def fill_shares(parents, depths, root, capacity):
    """Return the nodes to feed, [m] ascending, and the arguments of `Shares` for the tree of these nodes."""
    owner, feeds = np.empty(len(parents), np.int64), np.empty((len(capacity), len(parents)), np.bool_)
    left = capacity.copy()
    num_packed = _pack_beginning(parents, depths, root, capacity, owner, feeds, left)
    if num_packed < len(parents):
        fill(parents, root, owner, feeds, left)
        nodes = _chosen(owner, root)
        if _pack(parents, depths, root, nodes, capacity, owner, feeds, left):
            fill(parents, root, owner, feeds, left)
    sizes = capacity - left + root + 1
    fed, owned, num_owned = list_nodes(feeds, owner, sizes)
    nodes = _chosen(owner, root)
    places = np.empty(len(parents), np.int64)
    places[nodes] = np.arange(len(nodes))
    return nodes, owner[nodes], places[fed], places[owned], sizes, num_owned
