"""Trees that grow best first, and what a step's outcome leaves behind: compiled by Numba.

Letters: n nodes from the root on, T nodes in the tree.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.candidates import (
    MAX_CANDIDATES,
    ONE_BITS,
    collect,
    learn,
    merge,
    source_of,
    weigh,
)
from lp_runtime.lookahead.drafters.best_first.tables import (
    NUM_HASHES,
    NUM_ORDERS,
    STAMP,
    append_text,
    extend_hashes,
    mix,
    note_drawn,
    position_key,
    store_entry,
)
from lp_runtime.utils.jit import compiled

PROBABILITY_BITS = 40  # of a path
SEQUENCE_BITS = 20
MAX_PUSHED = (1 << SEQUENCE_BITS) - 1
NUM_SIZES = 4 * (PROBABILITY_BITS + 1)

# What a growing tree may take: [room] each, heap keys, parents, tokens and sources; how many of each size there were.
Pushed = namedtuple("Pushed", "heap parents tokens sources sizes")


def make_pushed(num_nodes: int) -> Pushed:
    """Room for what a tree of so many nodes may take."""
    room = min(num_nodes * MAX_CANDIDATES, MAX_PUSHED)
    arrays = [np.zeros(room, dtype) for dtype in (np.int64, np.int32, np.int32, np.int8)]
    return Pushed(*arrays, np.zeros(NUM_SIZES, np.int64))


@compiled
def sift_up(heap, at):
    """Restore a heap (the largest first) after its element `at` was added."""
    while at > 0:
        above = (at - 1) >> 1
        if heap[above] >= heap[at]:
            return
        heap[above], heap[at] = heap[at], heap[above]
        at = above


@compiled
def pop(heap, size):
    """Take the largest element of a heap of `size` elements."""
    top, last = heap[0], heap[size - 1]
    size -= 1
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1] > heap[below]:
            below += 1
        if heap[below] <= last:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last
    return top


@compiled
def size_of(estimate):
    """Which of NUM_SIZES an estimated path probability is of: four for each doubling."""
    bits = 0
    for step in (32, 16, 8, 4, 2, 1):
        if estimate >> (bits + step):
            bits += step
    return 4 * bits + ((estimate >> (bits - 2)) & 3 if bits >= 2 else 0)


@compiled
def smallest(size):
    """The smallest estimate of a size."""
    return np.int64(4 + (size & 3)) << ((size >> 2) - 2) if size >= 8 else np.int64(0)


@compiled
def grow(drafts, noise, rates, nodes, pushed, candidates, position, root, max_nodes, max_depth):
    """Grow a tree best first: of all candidates below all nodes, always the one that is likeliest to be parent_probability.

    Args:
        nodes: their tokens are those of the pending tokens, up to the root; the rest is written.
        position: absolute position of what follows the root.
        root: index of the root.
        max_nodes: nodes at most, the pending tokens included.
        max_depth: none stands deeper.

    Returns:
        (T, digest): the number of nodes; 64 bits that tell tokens and parents of trees apart.
    """
    for node in range(root + 1):
        nodes.parents[node], nodes.depths[node] = node - 1, node - root
    num_nodes = grow_below(drafts, noise, rates, nodes, pushed, candidates, position, root, max_nodes, max_depth)
    digest = np.int64(0)
    for node in range(num_nodes):
        digest = mix(digest * 31 + (nodes.parents[node] << 32) + nodes.tokens[node])
    return num_nodes, digest


@compiled
def grow_below(drafts, noise, rates, nodes, pushed, candidates, position, root, max_nodes, max_depth):
    """Grow a tree from its root on: see `grow`. Returns the number of nodes."""
    num_nodes = root + 1
    num_missing = max_nodes - num_nodes
    num_pushed = heap_size = 0
    pushed.sizes[:] = 0
    least, floor, num_counted = 0, np.int64(1), 0  # of what is below a size nothing need be pushed: so many are larger
    best = weigh(rates)
    node = root
    nodes.path_probabilities[root] = np.int64(1) << PROBABILITY_BITS
    for i in range(NUM_HASHES):
        nodes.hashes[root, i] = drafts.text.hashes[0, i]
    if num_missing <= 0:
        return num_nodes
    while True:
        parent_probability = nodes.path_probabilities[node] >> ONE_BITS
        if nodes.depths[node] < max_depth and parent_probability * best >= floor:
            num_rows = collect(drafts, noise, position + nodes.depths[node], nodes, root, node, candidates)
            for i in range(merge(rates, candidates, num_rows, (floor + parent_probability - 1) // parent_probability)):
                feature = candidates.best[i]
                probability = parent_probability * rates.kept[candidates.agreeing[i], feature]
                if probability < floor or num_pushed == len(pushed.heap):
                    continue
                pushed.sizes[size_of(probability)] += 1
                num_counted += 1
                while num_counted - pushed.sizes[least] >= num_missing:
                    num_counted -= pushed.sizes[least]
                    least += 1
                    floor = max(smallest(least), 1)
                pushed.heap[heap_size] = (probability << SEQUENCE_BITS) | (MAX_PUSHED - num_pushed)
                pushed.parents[num_pushed] = node
                pushed.tokens[num_pushed] = candidates.merged[i]
                pushed.sources[num_pushed] = source_of(feature)
                num_pushed += 1
                heap_size += 1
                sift_up(pushed.heap, heap_size - 1)
        if heap_size == 0 or num_nodes >= max_nodes:
            return num_nodes
        top = pop(pushed.heap, heap_size)
        heap_size -= 1
        index = MAX_PUSHED - (top & MAX_PUSHED)
        node, parent = num_nodes, np.int64(pushed.parents[index])
        nodes.tokens[node] = pushed.tokens[index]
        nodes.parents[node] = parent
        nodes.sources[node] = pushed.sources[index]
        nodes.depths[node] = nodes.depths[parent] + 1
        nodes.path_probabilities[node] = top >> SEQUENCE_BITS
        extend_hashes(nodes.hashes, parent, nodes.tokens[node], nodes.hashes, node)
        num_nodes += 1


@compiled
def remember(drafts, position, nodes, root, successors, entries, stamp):
    """Store what was found at all nodes from the root on, each under its last tokens; the first nodes win.

    Args:
        position: absolute position of what follows the root.
        successors: [T] what was drawn, by node.
        entries: [n, ENTRY] runners-up.
    """
    table = drafts.top_k
    for i in range(len(entries) - 1, -1, -1):
        node = root + i
        entries[i, STAMP] = stamp
        for order in range(1, NUM_ORDERS + 1):
            if nodes.hashes[node, order] == 0:
                break
            store_entry(table, nodes.hashes[node, order], entries, i)
        place = position + nodes.depths[node]
        note_drawn(table, position_key(drafts.text, place, nodes.tokens[node]), successors[node], stamp)
        note_drawn(table, position_key(drafts.text, place, -1), successors[node], stamp)


@compiled
def accept(tokens, parents, root, size, successors, path):
    """Follow the model's own choices from the root: see tree.py.

    Args:
        successors: [T] what was drawn; read from the root on.
        path: the root and the nodes of the path are written.

    Returns:
        how many were written.
    """
    path[0] = node = root
    num = 1
    for child in range(root + 1, size):  # children stand behind their parents
        if parents[child] == node and tokens[child] == successors[node]:
            path[num] = node = child
            num += 1
    return num


@compiled
def count(nodes, root, size, path, fed, accepted):
    """Count a step's nodes by source and depth, and those of its path below the root: see base.py."""
    for node in range(root + 1, size):
        fed[nodes.sources[node], min(nodes.depths[node], fed.shape[1]) - 1] += 1
    for i in range(1, len(path)):
        node = path[i]
        accepted[nodes.sources[node], min(nodes.depths[node], fed.shape[1]) - 1] += 1


@compiled
def advance(drafts, noise, rates, nodes, counts, candidates, position, path, run, successors, entries, stamp):
    """Take a step: count, learn from its run, remember what it found, append the run to the text.

    Args:
        counts: (fed, accepted).
        position: absolute position of what follows the root.
        path: the root, and the nodes that carry the run's tokens.
        run: committed tokens.
        successors: [T] what was drawn; read from the root on.
        entries: [n, ENTRY] runners-up of the nodes from the root on.
        stamp: the step's.
    """
    root = path[0]
    count(nodes, root, root + len(entries), path, counts[0], counts[1])
    learn(drafts, noise, position, nodes, root, path, run, rates, candidates)
    remember(drafts, position, nodes, root, successors, entries, stamp)
    append_text(drafts.text, run)
