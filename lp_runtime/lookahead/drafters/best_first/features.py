"""Features of candidates, by number, and the arrays of a growing tree and its candidates.

A feature is a candidate's source and, within it, the length of the match, its rank, its margin or its noise. Acceptance
is counted by feature (estimates.py).

Letters: K top-k candidates, T nodes in the tree, C largest number of candidates of a context.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.tables import MAX_GRAM, NUM_HASHES, NUM_ORDERS
from lp_runtime.lookahead.top_k import MAX_MARGIN, K
from lp_runtime.utils.jit import Int, inlined

NUM_BINS = 9  # of margins
NUM_RANKS = 4
NUM_NOISE_BINS = 4
NUM_LENGTHS = 10  # bins of a match's length
NUM_FORK_BINS = 3 * 3  # of the lengths of both matches of a fork
NUM_CORPUS_SHARES = 5  # bins of the share of the corpus' matches that a token followed
MAX_BACK = 2  # positions before a token whose alternatives are its candidates
FEATURES_PER_ORDER = NUM_RANKS * NUM_BINS

# Features of the text, by length of the match and noise: the longest match; shorter matches that other tokens followed;
# and both tokens of a fork, where MAX_GRAM tokens were followed by two different ones, the latest and then the earlier
# one, by which match is longer, length and noise.
FIRST_SHORTER = NUM_LENGTHS * NUM_NOISE_BINS
FIRST_COPY = 6 * NUM_NOISE_BINS  # from here to FIRST_SHORTER: matches of seven tokens or more
FIRST_FORK = FIRST_SHORTER + MAX_GRAM * NUM_NOISE_BINS
NUM_TEXT_FEATURES = FIRST_FORK + 2 * NUM_FORK_BINS * NUM_NOISE_BINS


class Source(NamedTuple):
    """One source of candidates."""

    name: str
    num_features: int
    num_rows: int  # rows of `Candidates` that it may fill for one context
    num_parts: int = 1  # parts of equally many features; each has constants in starting_rates.py


# The sources in the order of their features. Candidates of a forward pass, whether of a step, the vocabulary or the
# prefill, have features by rank and margin.
LAYOUT = (
    Source("text", NUM_TEXT_FEATURES, 1),
    *(Source(f"top-k {order + 1}", FEATURES_PER_ORDER, 1) for order in range(NUM_ORDERS)),
    Source("vocabulary", FEATURES_PER_ORDER, 1),
    Source("pairs", FEATURES_PER_ORDER, 1),  # the vocabulary prior after two tokens
    Source("prompt", NUM_ORDERS * FEATURES_PER_ORDER, 0, NUM_ORDERS),  # in the rows of "top-k": entries of the prefill
    Source("same position", 2 * K, 2, 2),  # by rank: after any token, then after the same token
    Source("alternatives", MAX_BACK * FEATURES_PER_ORDER, MAX_BACK, MAX_BACK),  # to the last token, the one before
    Source("corpus", NUM_LENGTHS * NUM_CORPUS_SHARES * NUM_NOISE_BINS, 1),  # by length, share and noise; last
    Source("forced", 0, 0, 0),  # tokens that a constraint forces
)
SOURCES = tuple(source.name for source in LAYOUT)
NUM_ROWS = sum(source.num_rows for source in LAYOUT)
FORCED = SOURCES.index("forced")
SOURCE_OF = np.repeat(np.arange(len(LAYOUT)), [source.num_features for source in LAYOUT])  # by feature
NUM_FEATURES = len(SOURCE_OF)
# Parts of sources, by the sources' names.
PARTS = tuple(source.name for source in LAYOUT for _ in range(source.num_parts))
NUM_PARTS = len(PARTS)
PART_OF = np.repeat(  # by feature
    np.arange(NUM_PARTS),
    [source.num_features // source.num_parts for source in LAYOUT for _ in range(source.num_parts)],
)


def _first_of(name: str) -> int:
    """Return the lowest feature of a source."""
    return sum(source.num_features for source in LAYOUT[: SOURCES.index(name)])


FIRST_TOP_K = _first_of("top-k 1")
FIRST_VOCABULARY = _first_of("vocabulary")
FIRST_PAIR = _first_of("pairs")
FIRST_PROMPT = _first_of("prompt")
FIRST_POSITION = _first_of("same position")
FIRST_ALTERNATIVE = _first_of("alternatives")
FIRST_CORPUS = _first_of("corpus")

MAX_VALUE = 1 << 20  # above any log-probability plus noise, in sixteenths of a nat
MAX_CANDIDATES = NUM_ROWS * K
NUM_BUCKETS = 256  # of the hash table of merged candidates, a power of two
assert min(NUM_BUCKETS, 128) > MAX_CANDIDATES  # buckets hold int8


class Nodes(NamedTuple):
    """The nodes of a growing tree.

    Attributes:
        rows: [4, T] int64; tokens, parents, depths and path_probabilities are views of it.
        path_probabilities: [T] int64 estimated probability that each node is on the accepted path, fixed point.
        sources: [T] int64 index into SOURCES.
        hashes: [T, NUM_HASHES] int64 hashes of the context that ends at each node.
        matches: [T, 3] int64 the corpus' match of that context: the range in CorpusIndex.places, from and to, and the
            number of tokens, 0 without a match.
    """

    rows: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    path_probabilities: np.ndarray
    sources: np.ndarray
    hashes: np.ndarray
    matches: np.ndarray


class Candidates(NamedTuple):
    """Candidates of one context: as collected, a row per source, and merged, one per token.

    Attributes:
        tokens: [NUM_ROWS, K] int32 collected token ids, -1 for none.
        features: [NUM_ROWS, K] int32 their features.
        merged: [C] int32 merged token ids.
        best: [C] int32 feature with the highest score that names each merged candidate.
        scores: [C] int64 that score.
        weights: [C] int64 sum of the weights of all features that name each merged candidate.
        probabilities: [C] int64 probability of each merged candidate in competition with the others, fixed point.
        buckets: [NUM_BUCKETS] int8 scratch: hash table of indices into `merged`, -1 for none.
        slots: [NUM_ROWS] int64 row of the top-k table, or of the vocabulary prior, to collect; -1 if collected already.
        bases: [NUM_ROWS] int64 lowest feature of each such row's candidates.
        values: [K] int32 scratch.
        bins: [MAX_MARGIN + 1] uint8 bin of each margin.
    """

    tokens: np.ndarray
    features: np.ndarray
    merged: np.ndarray
    best: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    probabilities: np.ndarray
    buckets: np.ndarray
    slots: np.ndarray
    bases: np.ndarray
    values: np.ndarray
    bins: np.ndarray


def make_candidates() -> Candidates:
    tokens, features = (np.zeros((NUM_ROWS, K), np.int32) for _ in range(2))
    merged, best = (np.zeros(MAX_CANDIDATES, np.int32) for _ in range(2))
    scores, weights, probabilities = (np.zeros(MAX_CANDIDATES, np.int64) for _ in range(3))
    slots, bases = (np.zeros(NUM_ROWS, np.int64) for _ in range(2))
    bins = np.array([margin_bin(margin) for margin in range(MAX_MARGIN + 1)], np.uint8)
    merged_arrays = (merged, best, scores, weights, probabilities, np.zeros(NUM_BUCKETS, np.int8))
    return Candidates(tokens, features, *merged_arrays, slots, bases, np.zeros(K, np.int32), bins)


def make_nodes(num_nodes: int) -> Nodes:
    rows = np.zeros((4, num_nodes), np.int64)
    tokens, parents, depths, path_probabilities = rows
    sources, hashes = np.zeros(num_nodes, np.int64), np.zeros((num_nodes, NUM_HASHES), np.int64)
    matches = np.zeros((num_nodes, 3), np.int64)
    return Nodes(rows, tokens, parents, depths, path_probabilities, sources, hashes, matches)


def margin_bin(margin: int) -> int:
    """Return the bin, 0 to NUM_BINS - 1, of a margin between two log-probabilities, with or without noise."""
    if margin < 5:
        return 0 if margin < 1 else (1 if margin < 2 else 2)
    if margin < 22:
        return 3 if margin < 11 else 4
    if margin < 64:
        return 5 if margin < 40 else 6
    return 7 if margin < 96 else 8


@inlined
def corpus_share(count: Int, num: Int) -> Int:
    """Return the bin, 0 to NUM_CORPUS_SHARES - 1, of a token that followed `count` of `num` places."""
    if 8 * count >= 7 * num:
        return 4 if num >= 4 else 3
    return 2 if 2 * count >= num else (1 if 4 * count >= num else 0)


@inlined
def length_bin(length: Int) -> Int:
    """Return the bin, 0 to NUM_LENGTHS - 1, of a match's length, >= 1."""
    if length <= 6:
        return length - 1
    if length <= 8:
        return 6
    return 7 if length <= 12 else (8 if length <= 20 else 9)


@inlined
def fork_bin(length: Int, other: Int) -> Int:
    """Return the bin, 0 to NUM_FORK_BINS - 1, of a match's length at a fork and that of the other match."""
    relation = 0 if length < other else (1 if length == other else 2)
    return 3 * relation + (0 if length <= 8 else (1 if length <= 20 else 2))


@inlined
def is_unrivalled(length: Int, other: Int) -> bool:
    """Return whether a match is so much longer than the other one of a fork that the other one hardly ever counts."""
    return bool(length > 20 and other <= 8)
