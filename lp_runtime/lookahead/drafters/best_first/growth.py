"""Trees that grow best first, and what a step's outcome leaves in the draft tables. Compiled by Numba.

Letters: T nodes in the tree, n of them from the root on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.candidates import (
    MAX_CANDIDATES,
    Candidates,
    Nodes,
    collect,
    source_of,
)
from lp_runtime.lookahead.drafters.best_first.estimates import ONE_BITS, Rates, calibrate, learn, merge
from lp_runtime.lookahead.drafters.best_first.guided import plant_root
from lp_runtime.lookahead.drafters.best_first.heap import pop, sift_up
from lp_runtime.lookahead.drafters.best_first.tables import (
    NUM_ORDERS,
    STAMP,
    DraftArrays,
    Int,
    Noise,
    append_text,
    extend_hashes,
    mix,
    position_key,
    store_entry,
    store_successor,
)
from lp_runtime.lookahead.guide import is_allowed
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.utils.jit import compiled

SEQUENCE_BITS = 20  # of a heap key: the order in which nodes were pushed, for ties
MAX_PUSHED = (1 << SEQUENCE_BITS) - 1
NUM_SIZES = 4 * (PATH_PROBABILITY_BITS + 1)  # four for each doubling of a path probability


class Frontier(NamedTuple):
    """Candidates that may be added to a growing tree, in a heap, the one with the highest path probability first.

    Attributes:
        heap: [capacity] int64 path probability, and how early the candidate was pushed; the largest first.
        parents: [capacity] int32 index of the parent, by push.
        tokens: [capacity] int32 token id, by push.
        sources: [capacity] int8 index in SOURCES, by push.
        sizes: [NUM_SIZES] int64 how many of each size were pushed.
    """

    heap: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    sources: np.ndarray
    sizes: np.ndarray


def make_frontier(num_nodes: int) -> Frontier:
    """Return an empty frontier with capacity for all candidates of `num_nodes` nodes."""
    capacity = min(num_nodes * MAX_CANDIDATES, MAX_PUSHED)
    heap, parents, tokens, sources = (np.zeros(capacity, dtype) for dtype in (np.int64, np.int32, np.int32, np.int8))
    return Frontier(heap, parents, tokens, sources, np.zeros(NUM_SIZES, np.int64))


@compiled
def size_of(path_probability: Int) -> Int:
    """Return which of NUM_SIZES a path probability has: four sizes for each doubling."""
    bits = 0
    for step in (32, 16, 8, 4, 2, 1):
        if path_probability >> (bits + step):
            bits += step
    return 4 * bits + ((path_probability >> (bits - 2)) & 3 if bits >= 2 else 0)


@compiled
def smallest(size: Int) -> Int:
    """Return the smallest path probability of a size."""
    return np.int64(4 + (size & 3)) << ((size >> 2) - 2) if size >= 8 else np.int64(0)


@compiled
def is_open(nodes: Nodes, masks: np.ndarray, root: Int, num_seeds: Int, node: Int, token: Int) -> bool:
    """Whether a token may follow a node and no seed says so already; arguments as of `grow`."""
    if node >= num_seeds:
        return True
    if node - root < len(masks) and not is_allowed(masks, node - root, token):
        return False
    for child in range(node + 1, num_seeds):  # noqa: SIM110 (Numba compiles no generators)
        if nodes.parents[child] == node and nodes.tokens[child] == token:
            return False
    return True


@compiled
def grow(
    drafts: DraftArrays,
    noise: Noise,
    rates: Rates,
    nodes: Nodes,
    frontier: Frontier,
    candidates: Candidates,
    position: Int,
    root: Int,
    num_seeds: Int,
    masks: np.ndarray,
    max_nodes: Int,
    max_depth: Int,
) -> tuple[Int, Int]:
    """Grow a tree best first: add, of all candidates below all nodes, always the one with the highest path probability.

    Args:
        drafts: the draft tables.
        noise: the noise of sampling.
        rates: the estimates; their calibration is brought up to date.
        nodes: the tree. The tokens up to the root are the pending ones; everything else is written.
        frontier: scratch.
        candidates: scratch.
        position: absolute position of what follows the root.
        root: index of the root.
        num_seeds: nodes that are there already, root + 1 at least; the tree grows below all from the root on.
        masks: [m, words] int32 bits of the tokens that may follow each of the first m nodes from the root on; the
            others may be followed by any.
        max_nodes: largest number of nodes, the pending tokens included.
        max_depth: largest depth below the root of a node.

    Returns:
        (T, digest): the number of nodes, and 64 bits that tell tokens and parents of trees apart.
    """
    for node in range(root + 1):
        nodes.parents[node], nodes.depths[node] = node - 1, node - root
    num_nodes = grow_below(
        drafts, noise, rates, nodes, frontier, candidates, position, root, num_seeds, masks, max_nodes, max_depth
    )
    digest = np.int64(0)
    for node in range(num_nodes):
        digest = mix(digest * 31 + (nodes.parents[node] << 32) + nodes.tokens[node])
    return num_nodes, digest


@compiled
def grow_below(
    drafts: DraftArrays,
    noise: Noise,
    rates: Rates,
    nodes: Nodes,
    frontier: Frontier,
    candidates: Candidates,
    position: Int,
    root: Int,
    num_seeds: Int,
    masks: np.ndarray,
    max_nodes: Int,
    max_depth: Int,
) -> Int:
    """Grow a tree from its root on and return the number of nodes: see `grow`."""
    num_nodes = num_seeds
    num_missing = max_nodes - num_nodes
    num_pushed = heap_size = 0
    frontier.sizes[:] = 0
    # Candidates below the floor, the smallest path probability of a size, need not be pushed: as many as the tree still
    # lacks are larger.
    floor_size, floor, num_counted = 0, np.int64(1), 0
    best = calibrate(rates)
    node = root
    plant_root(drafts, nodes, root)
    while num_missing > 0:
        parent_probability = nodes.path_probabilities[node] >> ONE_BITS
        if nodes.depths[node] < max_depth and parent_probability * best >= floor:
            num_rows = collect(drafts, noise, position + nodes.depths[node], nodes, root, node, candidates)
            for i in range(merge(rates, candidates, num_rows, (floor + parent_probability - 1) // parent_probability)):
                feature = candidates.best[i]
                probability = parent_probability * rates.calibrated[candidates.agreeing[i], feature]
                is_wanted = probability >= floor and num_pushed < len(frontier.heap)
                if not (is_wanted and is_open(nodes, masks, root, num_seeds, node, candidates.merged[i])):
                    continue
                frontier.sizes[size_of(probability)] += 1
                num_counted += 1
                while num_counted - frontier.sizes[floor_size] >= num_missing:
                    num_counted -= frontier.sizes[floor_size]
                    floor_size += 1
                    floor = max(smallest(floor_size), np.int64(1))
                frontier.heap[heap_size] = (probability << SEQUENCE_BITS) | (MAX_PUSHED - num_pushed)
                frontier.parents[num_pushed] = node
                frontier.tokens[num_pushed] = candidates.merged[i]
                frontier.sources[num_pushed] = source_of(feature)
                num_pushed += 1
                heap_size += 1
                sift_up(frontier.heap, heap_size - 1)
        if node + 1 < num_seeds:
            node += 1
            continue
        if heap_size == 0 or num_nodes >= max_nodes:
            break
        top = pop(frontier.heap, heap_size)
        heap_size -= 1
        index = MAX_PUSHED - (top & MAX_PUSHED)
        node, parent = num_nodes, np.int64(frontier.parents[index])
        nodes.tokens[node] = frontier.tokens[index]
        nodes.parents[node] = parent
        nodes.sources[node] = frontier.sources[index]
        nodes.depths[node] = nodes.depths[parent] + 1
        nodes.path_probabilities[node] = top >> SEQUENCE_BITS
        extend_hashes(nodes.hashes, parent, nodes.tokens[node], nodes.hashes, node)
        num_nodes += 1
    return num_nodes


@compiled
def store_results(
    drafts: DraftArrays,
    position: Int,
    nodes: Nodes,
    root: Int,
    successors: np.ndarray,
    entries: np.ndarray,
    stamp: Int,
) -> None:
    """Store the top-k candidates of all nodes from the root on by context, and their successors by position.

    Of nodes with equal contexts, the first one's candidates are kept.

    Args:
        drafts: the draft tables.
        position: absolute position of what follows the root.
        nodes: the tree.
        root: index of the root.
        successors: [T] int64 successor of each node.
        entries: [n, ENTRY] int32 top-k candidates; the stamp is written into them.
        stamp: the step's.
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
        store_successor(table, position_key(drafts.text, place, nodes.tokens[node]), successors[node], stamp)
        store_successor(table, position_key(drafts.text, place, -1), successors[node], stamp)


@compiled
def accept(
    tokens: np.ndarray, parents: np.ndarray, root: Int, size: Int, successors: np.ndarray, path: np.ndarray
) -> Int:
    """Follow the model's own choices from the root: see lp_runtime.lookahead.tree.accept.

    Args:
        tokens: [T] int64 token ids.
        parents: [T] int64 index of each node's parent.
        root: index of the root.
        size: T.
        successors: [T] int64 successor of each node; read from the root on.
        path: the root and the accepted nodes are written to it.

    Returns:
        How many nodes were written.
    """
    path[0] = node = root
    num = 1
    for child in range(root + 1, size):  # children stand behind their parents
        if parents[child] == node and tokens[child] == successors[node]:
            path[num] = node = child
            num += 1
    return num


@compiled
def count(nodes: Nodes, root: Int, size: Int, path: np.ndarray, fed: np.ndarray, accepted: np.ndarray) -> None:
    """Count a step's nodes below the root by source and depth: see lp_runtime.lookahead.drafters.base.Counts.

    Args:
        nodes: the tree.
        root: index of the root.
        size: T.
        path: [m] int64 the root and the accepted nodes.
        fed: [sources, MAX_DEPTH_COUNTED] int64, counted up.
        accepted: [sources, MAX_DEPTH_COUNTED] int64, counted up.
    """
    for node in range(root + 1, size):
        fed[nodes.sources[node], min(nodes.depths[node], fed.shape[1]) - 1] += 1
    for i in range(1, len(path)):
        node = path[i]
        accepted[nodes.sources[node], min(nodes.depths[node], fed.shape[1]) - 1] += 1


@compiled
def advance(
    drafts: DraftArrays,
    noise: Noise,
    rates: Rates,
    nodes: Nodes,
    counts: tuple[np.ndarray, np.ndarray],
    candidates: Candidates,
    position: Int,
    path: np.ndarray,
    committed: np.ndarray,
    successors: np.ndarray,
    entries: np.ndarray,
    stamp: Int,
) -> None:
    """Count a step's nodes, learn from its committed tokens, store its results and append the tokens to the text.

    Args:
        drafts: the draft tables.
        noise: the noise of sampling.
        rates: the estimates.
        nodes: the tree.
        counts: (fed, accepted), see `count`.
        candidates: scratch.
        position: absolute position of what follows the root.
        path: [m] int64 the root, and the nodes that carry the committed tokens.
        committed: [m] int64 committed tokens.
        successors: [T] int64 successor of each node; read from the root on.
        entries: [n, ENTRY] int32 top-k candidates of the nodes from the root on.
        stamp: the step's.
    """
    root = path[0]
    count(nodes, root, root + len(entries), path, counts[0], counts[1])
    learn(drafts, noise, position, nodes, root, path, committed, rates, candidates)
    store_results(drafts, position, nodes, root, successors, entries, stamp)
    append_text(drafts.text, committed)
