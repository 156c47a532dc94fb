"""Best-first growth of trees. Compiled by Numba.

Letters: T nodes in the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.candidates import collect
from lp_runtime.lookahead.drafters.best_first.corpus import extend_match
from lp_runtime.lookahead.drafters.best_first.estimates import (
    ONE_BITS,
    Rates,
    compete,
    merge,
    missing_copies,
    score_features,
)
from lp_runtime.lookahead.drafters.best_first.features import (
    FIRST_CORPUS,
    MAX_CANDIDATES,
    NUM_FEATURES,
    SOURCE_OF,
    Candidates,
    Nodes,
)
from lp_runtime.lookahead.drafters.best_first.guided import Limits, is_refused, plant_root
from lp_runtime.lookahead.drafters.best_first.heap import pop, sift_up
from lp_runtime.lookahead.drafters.best_first.tables import DraftArrays, Noise, extend_hashes, mix
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.utils.jit import Int, compiled, inlined

SEQUENCE_BITS = 20  # low bits of a heap key: the order in which candidates were pushed, which decides ties
MAX_PUSHED = (1 << SEQUENCE_BITS) - 1
NUM_SIZES = 4 * (PATH_PROBABILITY_BITS + 1)  # histogram bins: four for each doubling of a path probability


class Frontier(NamedTuple):
    """A heap of candidates that may be added to a growing tree, highest path probability first.

    Attributes:
        heap: [capacity] int64 path probability, and in the low bits how early the candidate was pushed; largest first.
        parents: [capacity] int32 index of the parent, in order of pushes.
        tokens: [capacity] int32 token id, in order of pushes.
        sources: [capacity] int8 index in SOURCES, in order of pushes.
        sizes: [NUM_SIZES] int64 number of candidates pushed per bin of path probability.
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


@inlined
def size_of(path_probability: Int) -> Int:
    """Return the bin, of NUM_SIZES, of a path probability: four bins for each doubling."""
    bits = 0
    for step in (32, 16, 8, 4, 2, 1):
        if path_probability >> (bits + step):
            bits += step
    return 4 * bits + ((path_probability >> (bits - 2)) & 3 if bits >= 2 else 0)


@inlined
def smallest(size: Int) -> Int:
    """Return the smallest path probability in a bin."""
    return np.int64(4 + (size & 3)) << ((size >> 2) - 2) if size >= 8 else np.int64(0)


@inlined
def features_in_use(drafts: DraftArrays) -> Int:
    """Return how many features candidates may have: without a corpus, those before the corpus features."""
    return NUM_FEATURES if len(drafts.corpus.tokens) else FIRST_CORPUS


@inlined
def is_open(nodes: Nodes, limits: Limits, root: Int, num_seeds: Int, node: Int, token: Int) -> bool:
    """Return whether a token may follow a node and is not among the seeds yet; arguments as of `grow`."""
    if node >= num_seeds:
        return True
    if is_refused(limits, root, node, token):
        return False
    for child in range(node + 1, num_seeds):  # noqa: SIM110 (Numba compiles no generators)
        if nodes.parents[child] == node and nodes.tokens[child] == token:
            return False
    return True


@inlined
def digest_of(nodes: Nodes, num_nodes: Int) -> Int:
    """Return a 64-bit digest of the tokens and parents of a tree."""
    digest = np.int64(0)
    for node in range(num_nodes):
        digest = mix(digest * 31 + (nodes.parents[node] << 32) + nodes.tokens[node])
    return digest


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
    limits: Limits,
    max_nodes: Int,
    max_depth: Int,
) -> tuple[Int, Int]:
    """Grow a tree best first: repeatedly add the candidate with the highest path probability.

    Returns (T, digest): the number of nodes, and a 64-bit digest of tokens and parents.

    Args:
        rates: the estimates; their scores are recomputed.
        nodes: the tree. The tokens up to the root are the pending ones; everything else is written.
        frontier, candidates: scratch.
        position: absolute position of the token after the root.
        num_seeds: existing nodes, at least root + 1; the tree grows below all of them from the root on.
        max_nodes: largest number of nodes, including the pending tokens.
        max_depth: largest depth of a node below the root.
    """
    num_nodes = num_seeds
    num_missing = max_nodes - num_nodes
    num_pushed = heap_size = 0
    frontier.sizes[:] = 0
    # Candidates below the floor, the smallest path probability of a bin, need not be pushed: enough larger ones to
    # complete the tree have been pushed already.
    floor_size, floor, num_counted = 0, np.int64(1), 0
    score_features(rates, missing_copies(rates), features_in_use(drafts))
    node = root
    plant_root(drafts, nodes, root)
    while num_missing > 0:
        parent_probability = nodes.path_probabilities[node] >> ONE_BITS
        if nodes.depths[node] < max_depth and parent_probability << ONE_BITS >= floor:
            num_rows = collect(drafts, noise, position + nodes.depths[node], nodes, root, node, candidates)
            num = merge(rates, candidates, num_rows)
            compete(rates, candidates, num, node == root, (floor + parent_probability - 1) // parent_probability)
            for i in range(num):
                probability = parent_probability * candidates.probabilities[i]
                is_wanted = probability >= floor and num_pushed < len(frontier.heap)
                if not (is_wanted and is_open(nodes, limits, root, num_seeds, node, candidates.merged[i])):
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
                frontier.sources[num_pushed] = SOURCE_OF[candidates.best[i]]
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
        extend_match(drafts.corpus, nodes.matches, parent, nodes.tokens[node], node)
        num_nodes += 1
    return num_nodes, digest_of(nodes, num_nodes)
