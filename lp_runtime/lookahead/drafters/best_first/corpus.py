"""A corpus: texts that answers may repeat, indexed by a suffix array. Compiled by Numba.

The places of the corpus are sorted by the tokens from each place on. So the places that follow a context are a range of
them, in which equal next tokens are neighbours. The range of a node is found within its parent's.

After: retrieval-based speculation (REST, arXiv 2311.08252).

Letters: N tokens of the corpus, T nodes in the tree, K candidates of a source.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.utils.jit import Int, inlined

MAX_ROOT_MATCH = 8  # tokens of the text that the root's match is sought for
MIN_ROOT_MATCH = 2
SORTED_TOKENS = 32  # that places are sorted by, a power of two; at least MAX_ROOT_MATCH and the depth of a tree
MAX_SAMPLED = 32  # places of a match whose next tokens are counted


class CorpusIndex(NamedTuple):
    """Texts and their suffix array, which may be mapped from a file.

    Attributes:
        tokens: [N] int32 token ids; -1 after each text.
        places: [N] int32 all places, sorted by the SORTED_TOKENS tokens from each place on.
    """

    tokens: np.ndarray
    places: np.ndarray


NO_CORPUS = CorpusIndex(np.zeros(0, np.int32), np.zeros(0, np.int32))


def index_tokens(tokens: np.ndarray) -> CorpusIndex:
    """Return the index of [N] int32 tokens, -1 after each text."""
    order, rank, width = np.zeros(len(tokens), np.int64), tokens.astype(np.int64) + 1, 1
    while width < SORTED_TOKENS:  # places are ranked by `width` tokens; then by twice as many
        keys = rank * (len(tokens) + int(rank.max()) + 2)
        keys[:-width] += rank[width:] + 1
        order = np.argsort(keys, kind="stable")
        rank[order] = np.concatenate([[0], np.cumsum(np.diff(keys[order]) != 0)])
        width *= 2
    return CorpusIndex(tokens, order.astype(np.int32))


@inlined
def token_at(corpus: CorpusIndex, index: Int, offset: Int) -> Int:
    """Return the token `offset` after the place in `places[index]`; -1 after the end."""
    place = corpus.places[index] + offset
    return np.int64(corpus.tokens[place]) if place < len(corpus.tokens) else np.int64(-1)


@inlined
def bound_of(corpus: CorpusIndex, low: Int, high: Int, offset: Int, token: Int) -> Int:
    """Return the first index in [low, high) whose token at `offset` is at least `token`; else `high`."""
    while low < high:
        middle = (low + high) >> 1
        if token_at(corpus, middle, offset) < token:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def match_root(corpus: CorpusIndex, buffer: np.ndarray, span: np.ndarray, matches: np.ndarray, root: Int) -> None:
    """Write the match of the text's longest end that the corpus has, up to MAX_ROOT_MATCH tokens.

    `buffer` and `span` are the text's, see TextIndex; `matches` the nodes', see Nodes.
    """
    matches[root, 2] = 0
    if len(corpus.tokens) == 0:
        return
    last, end = len(buffer) - 1, span[1]
    least, most = MIN_ROOT_MATCH - 1, min(MAX_ROOT_MATCH, end - span[0])  # a match of `least` tokens is not sought
    while least < most:
        length = (least + most + 1) >> 1
        low, high = np.int64(0), np.int64(len(corpus.places))
        for offset in range(length):
            token = buffer[(end - length + offset) & last]
            low = bound_of(corpus, low, high, offset, token)
            high = bound_of(corpus, low, high, offset, token + 1)
        if low < high:
            matches[root, 0], matches[root, 1], matches[root, 2] = low, high, length
            least = length
        else:
            most = length - 1


@inlined
def extend_match(corpus: CorpusIndex, matches: np.ndarray, parent: Int, token: Int, node: Int) -> None:
    """Write the match of a node: that of its parent, extended by the node's token."""
    length = matches[parent, 2]
    matches[node, 2] = 0
    if length == 0 or length >= SORTED_TOKENS:
        return
    low = bound_of(corpus, matches[parent, 0], matches[parent, 1], length, token)
    high = bound_of(corpus, low, matches[parent, 1], length, token + 1)
    if low < high:
        matches[node, 0], matches[node, 1], matches[node, 2] = low, high, length + 1


@inlined
def count_next(
    corpus: CorpusIndex, matches: np.ndarray, node: Int, tokens: np.ndarray, row: Int, counts: np.ndarray
) -> Int:
    """Write the K tokens that most often follow a match, in that order; return how many places count.

    Writes row `row` of `tokens`, [n, K] int32, -1 for none, and their `counts`, [K] int32. Of many places only some are
    counted.
    """
    low, size, length = matches[node, 0], matches[node, 1] - matches[node, 0], matches[node, 2]
    num = min(size, np.int64(MAX_SAMPLED))
    num_tokens = len(counts)
    for rank in range(num_tokens):
        tokens[row, rank], counts[rank] = -1, 0
    at = 0
    while at < num:
        token, first = token_at(corpus, low + at * size // num, length), at
        while at < num and token_at(corpus, low + at * size // num, length) == token:
            at += 1
        if token < 0:
            continue
        count, rank = np.int32(at - first), num_tokens
        while rank > 0 and counts[rank - 1] < count:
            rank -= 1
            if rank + 1 < num_tokens:
                tokens[row, rank + 1], counts[rank + 1] = tokens[row, rank], counts[rank]
        if rank < num_tokens:
            tokens[row, rank], counts[rank] = token, count
    return num
