"""Fill several replicas of limited capacity with a tree's nodes, the likeliest first. Compiled.

If the whole tree fits, all of it is fed. Else each node goes where it adds the fewest nodes, in the tree's order, which
is that of what they promise; what fits nowhere is left out. Then all of it is packed anew, leaf by leaf, which leaves
room for more.

Letters: T nodes in the tree, R replicas.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.distributed.partition.bin_packing import feed_leaves, fits, leaves_deep_first, list_nodes
from lp_runtime.utils.jit import compiled, inlined

MAX_ROUNDS = 8  # of packing anew and filling: more find 1% more nodes on 8 replicas


@inlined
def _cheapest(parents, parent, feeds, left):
    """Find the replica where a node adds the fewest: itself, and its ancestors that the replica does not feed yet.

    Args:
        parents: [T] index of each node's parent.
        parent: The node's parent.
        feeds: [R, T] bool, whether each replica feeds each node.
        left: [R] nodes that each replica may still feed.

    Returns:
        (rank, added): of several replicas the one with the most capacity left, and how many nodes the node adds there.
        -1 for the rank if it fits nowhere; the number means nothing then.
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
    """Let all replicas feed the pending tokens and nothing else, and the first own the root.

    Args:
        root: Index of the root.
        owner: [T] see `fill`, written.
        feeds: [R, T] see `fill`, written.
    """
    feeds[:, : root + 1] = True
    feeds[:, root + 1 :] = False
    owner[:] = -1
    owner[root] = 0


@inlined(makes_arrays=True)
def fill(parents, root, owner, feeds, left):
    """Give nodes without an owner to the replicas, in the tree's order, and return how many nodes have one then.

    Args:
        parents: [T] index of each node's parent.
        root: Index of the root.
        owner: [T] rank that owns each node, written; -1 for what is left out and before the root.
        feeds: [R, T] bool, whether each replica feeds each node, written.
        left: [R] nodes that each replica may still feed, written.
    """
    total, num_owned = left.sum(), 1
    for node in range(root + 1, len(parents)):
        if owner[node] < 0 and owner[parents[node]] >= 0 and total > 0:
            rank, num_added = _cheapest(parents, parents[node], feeds, left)
            if rank >= 0:
                owner[node] = rank
                left[rank] -= num_added
                total -= num_added
                ancestor = np.int64(node)
                while not feeds[rank, ancestor]:
                    feeds[rank, ancestor] = True
                    ancestor = parents[ancestor]
        num_owned += owner[node] >= 0
    return num_owned


@inlined(makes_arrays=True)
def _pack(parents, depths, root, nodes, capacity, owner, feeds, left):
    """Pack some nodes tightly; return whether they fit. If not, nothing changes.

    Args:
        parents: [T] index of each node's parent.
        depths: [T] depth of each node below the root.
        root: Index of the root.
        nodes: [m] the nodes, ascending: the pending tokens, and the parent of each of the others.
        capacity: [R] nodes beside the pending ones that each replica may feed.
        owner: [T] see `fill`, written.
        feeds: [R, T] see `fill`, written.
        left: [R] see `fill`, written.
    """
    if capacity.sum() < len(nodes) - root - 1:
        return False
    places = np.full(len(parents) + 1, -1, np.int64)  # the last one stands for the parent of the first token, -1
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


@compiled(makes_arrays=True)
def fill_shares(parents, depths, root, capacity):
    """Return shares of the tree's nodes, each where it fits, the first ones first; what is left out has no owner.

    Args:
        parents: [T] index of each node's parent.
        depths: [T] depth of each node below the root.
        root: Index of the root.
        capacity: [R] nodes beside the pending ones that each replica may feed.

    Returns:
        (owner, nodes, owned, sizes, num_owned), as `Shares` takes them but for arrays of sizes.
    """
    owner, feeds = np.empty(len(parents), np.int64), np.empty((len(capacity), len(parents)), np.bool_)
    left = capacity.copy()
    if not _pack(parents, depths, root, np.arange(len(parents)), capacity, owner, feeds, left):
        feed_pending(root, owner, feeds)
        num_kept = fill(parents, root, owner, feeds, left)
        for _ in range(MAX_ROUNDS):
            nodes = np.flatnonzero((owner >= 0) | (np.arange(len(parents)) < root))
            if not _pack(parents, depths, root, nodes, capacity, owner, feeds, left):
                break
            num_before, num_kept = num_kept, fill(parents, root, owner, feeds, left)
            if num_kept == num_before:
                break
    sizes = capacity - left + root + 1
    nodes, owned, num_owned = list_nodes(feeds, owner, sizes)
    return owner, nodes, owned, sizes, num_owned
