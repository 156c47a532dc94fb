"""Candidates: tokens that may follow a context, from all sources. Compiled by Numba.

A candidate's feature (features.py) encodes its source and how well it fits. Everything is integer arithmetic, so equal
inputs give equal candidates on every replica.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.lookahead.drafters.best_first.corpus import CorpusIndex, count_next
from lp_runtime.lookahead.drafters.best_first.features import (
    FEATURES_PER_ORDER,
    FIRST_ALTERNATIVE,
    FIRST_CORPUS,
    FIRST_FORK,
    FIRST_PAIR,
    FIRST_POSITION,
    FIRST_PROMPT,
    FIRST_SHORTER,
    FIRST_TOP_K,
    FIRST_VOCABULARY,
    MAX_BACK,
    MAX_VALUE,
    NUM_BINS,
    NUM_CORPUS_SHARES,
    NUM_FORK_BINS,
    NUM_NOISE_BINS,
    NUM_RANKS,
    Candidates,
    Nodes,
    corpus_share,
    fork_bin,
    is_unrivalled,
    length_bin,
)
from lp_runtime.lookahead.drafters.best_first.tables import (
    MAX_GRAM,
    MAX_MATCH,
    NUM_ORDERS,
    TEMPERATURE_BITS,
    DraftArrays,
    Noise,
    TextIndex,
    alternatives_key,
    find_ngram,
    find_slot,
    gumbel,
    is_held,
    position_key,
)
from lp_runtime.lookahead.top_k import FROM_PROMPT, MAX_MARGIN, ORIGIN, K, margin_of
from lp_runtime.utils.jit import Int, inlined


@inlined
def match_length(text: TextIndex, nodes: Nodes, root: Int, node: Int, place: Int) -> Int:
    """Return how many tokens before a place in the text, which ends at the root, also end the context of `node`."""
    last = len(text.buffer) - 1
    max_length = min(MAX_MATCH, place)
    at, end = node, text.span[1] - 1
    for length in range(max_length):
        if at > root:
            token = nodes.tokens[at]
            at = nodes.parents[at]
        else:  # the root is the text's last token
            if end < text.span[0]:
                return length
            token = text.buffer[end & last]
            end -= 1
        if text.buffer[(place - 1 - length) & last] != token:
            return length
    return max_length


@inlined
def collect(
    drafts: DraftArrays, noise: Noise, position: Int, nodes: Nodes, root: Int, node: Int, candidates: Candidates
) -> Int:
    """Write the candidates that may follow `node` at `position`, with features; return the number of rows.

    Only `candidates.tokens` and `.features` are written; a token may occur several times.
    """
    # Rows have a fixed length, so that loops over them are compiled to vector instructions.
    table, slots, bases = drafts.top_k, candidates.slots, candidates.bases
    num_known = collect_match(drafts.text, noise, position, nodes, root, node, candidates)
    num_rows = find_contexts(drafts, nodes, node, candidates, num_known)
    num_rows = find_prior(drafts, nodes, root, node, candidates, num_rows)
    num_rows = collect_position(drafts, position, nodes.tokens[node], candidates, num_rows)
    num_rows = find_alternatives(drafts, position, nodes.depths[node], candidates, num_rows)
    for row in range(num_known, num_rows):  # one call: each copy of `collect_entry` takes long to compile
        if slots[row] >= 0:
            entries = table.entries
            if is_prior(bases[row]):
                prior = drafts.vocabulary
                entries = prior.after_pair if bases[row] == FIRST_PAIR else prior.after_token
            collect_entry(entries, slots[row], bases[row], noise, position, candidates, row)
    return collect_corpus(drafts.corpus, noise, position, nodes, node, candidates, num_rows)


@inlined
def collect_match(
    text: TextIndex, noise: Noise, position: Int, nodes: Nodes, root: Int, node: Int, candidates: Candidates
) -> Int:
    """Write the continuations of the longest match in the text, and of other ones, to the first row.

    Others are the earlier continuation where the text forks, and shorter matches that other tokens followed. Returns
    the number of rows written, 0 or 1.
    """
    place, length = find_ngram(text, nodes.hashes, node)
    if length == 0:
        return 0
    last = len(text.buffer) - 1
    tokens = candidates.tokens
    for rank in range(K):
        tokens[0, rank] = -1
    num = collect_fork(text, noise, position, nodes, root, node, candidates, place, length)
    for shorter in range(min(length, MAX_GRAM) - 1, 0, -1):
        place = text.places[find_slot(text.keys, nodes.hashes[node, shorter]), 0]
        token = text.buffer[place & last]
        is_known = False
        for rank in range(num):
            is_known |= tokens[0, rank] == token
        if not is_known:
            tokens[0, num] = token
            base = FIRST_SHORTER + (shorter - 1) * NUM_NOISE_BINS
            candidates.features[0, num] = base + noise_bin(noise, position, token)
            num += 1
    return 1


@inlined
def collect_fork(
    text: TextIndex,
    noise: Noise,
    position: Int,
    nodes: Nodes,
    root: Int,
    node: Int,
    candidates: Candidates,
    place: Int,
    length: Int,
) -> Int:
    """Write the token after `length` matching tokens, and that of the fork there, if any; return how many.

    At a fork, a match that is much longer than the other one is the only one.
    """
    last = len(text.buffer) - 1
    tokens, lengths = candidates.tokens, candidates.values
    fork = text.forks[place & last] if length == MAX_GRAM else np.int64(0)
    num = 2 if is_held(text, fork) else 1
    for rank in range(num):
        lengths[rank] = length
        if length == MAX_GRAM:
            lengths[rank] = match_length(text, nodes, root, node, fork if rank else place)
    if num == 2 and is_unrivalled(lengths[1], lengths[0]):
        place, lengths[0], num = fork, lengths[1], 1
    elif num == 2 and is_unrivalled(lengths[0], lengths[1]):
        num = 1
    for rank in range(num):
        tokens[0, rank] = text.buffer[(fork if rank else place) & last]
        base = length_bin(lengths[0]) * NUM_NOISE_BINS
        if num == 2:
            base = FIRST_FORK + (rank * NUM_FORK_BINS + fork_bin(lengths[rank], lengths[1 - rank])) * NUM_NOISE_BINS
        candidates.features[0, rank] = base + noise_bin(noise, position, tokens[0, rank])
    return num


@inlined
def noise_bin(noise: Noise, position: Int, token: Int) -> Int:
    """Return the bin, 0 to NUM_NOISE_BINS - 1, of a token's noise at a position; 0 without noise."""
    if not noise.is_on:
        return 0
    value = gumbel(noise, position, token)
    return 0 if value < 0 else (1 if value < 16 else (2 if value < 40 else 3))


@inlined
def find_contexts(drafts: DraftArrays, nodes: Nodes, node: Int, candidates: Candidates, num_rows: Int) -> Int:
    """Find the top-k candidates for a node's last 1 to NUM_ORDERS tokens.

    Writes `slots` and `bases` of rows from `num_rows` on, and returns the new number of rows.
    """
    table, slots, bases = drafts.top_k, candidates.slots, candidates.bases
    for order in range(NUM_ORDERS):
        key = nodes.hashes[node, order + 1]
        slot = find_slot(table.keys, key) if key != 0 else -1
        if slot < 0:
            break
        first = FIRST_PROMPT if table.entries[slot, ORIGIN] == FROM_PROMPT else FIRST_TOP_K
        slots[num_rows], bases[num_rows] = slot, first + order * FEATURES_PER_ORDER
        num_rows += 1
    return num_rows


@inlined
def is_prior(base: Int) -> bool:
    """Return whether the features from `base` on are those of the vocabulary prior, after one token or two."""
    return bool(FIRST_VOCABULARY <= base <= FIRST_PAIR)


@inlined
def find_prior(drafts: DraftArrays, nodes: Nodes, root: Int, node: Int, candidates: Candidates, num_rows: Int) -> Int:
    """Find the vocabulary prior's candidates for a node's token, and for the last two tokens, as in `find_contexts`.

    The latter are known if the token before is one of the first P, and the node's token one of its K likeliest
    successors.
    """
    prior, slots, bases = drafts.vocabulary, candidates.slots, candidates.bases
    token, before = nodes.tokens[node], token_before(drafts.text, nodes, root, node)
    if token < len(prior.after_token):
        slots[num_rows], bases[num_rows] = token, FIRST_VOCABULARY
        num_rows += 1
    if 0 <= before * K < len(prior.after_pair):
        for rank in range(K):
            if prior.after_token[before, rank] == token:
                slots[num_rows], bases[num_rows] = before * K + rank, FIRST_PAIR
                return num_rows + 1
    return num_rows


@inlined
def token_before(text: TextIndex, nodes: Nodes, root: Int, node: Int) -> Int:
    """Return the token before that of a node, in the tree or in the text, which ends at the root; -1 for none."""
    if node > root:
        return np.int64(nodes.tokens[nodes.parents[node]])
    place = text.span[1] - 2
    return np.int64(text.buffer[place & (len(text.buffer) - 1)]) if place >= text.span[0] else np.int64(-1)


@inlined
def collect_position(drafts: DraftArrays, position: Int, token: Int, candidates: Candidates, num_rows: Int) -> Int:
    """Append earlier predictions for this position, after any token and `token`; return the row count."""
    table = drafts.top_k
    for with_token in range(2):
        slot = find_slot(table.keys, position_key(drafts.text, position, token if with_token else -1))
        if slot >= 0:
            for rank in range(K):
                candidates.tokens[num_rows, rank] = table.entries[slot, rank]
                candidates.features[num_rows, rank] = FIRST_POSITION + with_token * K + rank
            candidates.slots[num_rows] = -1
            num_rows += 1
    return num_rows


@inlined
def find_alternatives(drafts: DraftArrays, position: Int, depth: Int, candidates: Candidates, num_rows: Int) -> Int:
    """Find what the model also considered in place of the last committed tokens; return the row count.

    A token that was likely there, but did not come, often comes one or two tokens later. `depth` is that of the node
    that the candidates may follow: there are no such alternatives to tokens below the root.
    """
    for back in range(1 + depth, MAX_BACK + 1):
        slot = find_slot(drafts.top_k.keys, alternatives_key(drafts.text, position - back))
        if slot >= 0:
            candidates.slots[num_rows] = slot
            candidates.bases[num_rows] = FIRST_ALTERNATIVE + (back - 1) * FEATURES_PER_ORDER
            num_rows += 1
    return num_rows


@inlined
def collect_corpus(
    corpus: CorpusIndex, noise: Noise, position: Int, nodes: Nodes, node: Int, candidates: Candidates, num_rows: Int
) -> Int:
    """Append the most frequent tokens after a node's match in the corpus; return the row count."""
    if nodes.matches[node, 2] == 0:
        return num_rows
    counts = candidates.values
    num = count_next(corpus, nodes.matches, node, candidates.tokens, num_rows, counts)
    base = FIRST_CORPUS + length_bin(nodes.matches[node, 2]) * NUM_CORPUS_SHARES * NUM_NOISE_BINS
    for rank in range(K):
        token = candidates.tokens[num_rows, rank]
        if token < 0:
            break
        feature = base + corpus_share(counts[rank], num) * NUM_NOISE_BINS + noise_bin(noise, position, token)
        candidates.features[num_rows, rank] = feature
    return num_rows + 1


@inlined
def collect_entry(
    entries: np.ndarray, row: Int, base: Int, noise: Noise, position: Int, candidates: Candidates, to: Int
) -> None:
    """Write row `to` of the candidates from row `row` of `entries`, [n, ENTRY] int32.

    Their features, from `base` on, are by rank and margin, both after adding any noise.
    """
    features, bins = candidates.features, candidates.bins
    for rank in range(K):
        candidates.tokens[to, rank] = entries[row, rank]
    if noise.is_on:
        rank_perturbed(entries, row, base, noise, position, candidates, to)
        return
    for rank in range(K):
        features[to, rank] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + bins[margin_of(entries, row, rank)]
    # The first candidate's feature is its margin to the second one: the wider, the likelier it is.
    features[to, 0] = base + 8 - bins[margin_of(entries, row, 1)]


@inlined
def rank_perturbed(
    entries: np.ndarray, row: Int, base: Int, noise: Noise, position: Int, candidates: Candidates, to: Int
) -> None:
    """Write the features of an entry's candidates by rank and margin of log-probability plus noise.

    Entries from steps are at the request's temperature; the vocabulary prior is at temperature 1.
    """
    values, bins = candidates.values, candidates.bins
    factor = noise.inverse_temperature if is_prior(base) else np.int64(1) << TEMPERATURE_BITS
    best, second = np.int32(-MAX_VALUE), np.int32(-MAX_VALUE)
    for i in range(K):
        values[i] = -MAX_VALUE - i
        if entries[row, i] >= 0:
            margin = margin_of(entries, row, i) * factor >> TEMPERATURE_BITS
            values[i] = gumbel(noise, position, entries[row, i]) - margin
        second = max(second, min(best, values[i]))
        best = max(best, values[i])
    for i in range(K):
        rank = 0
        for j in range(i):
            rank += values[j] >= values[i]
        for j in range(i + 1, K):
            rank += values[j] > values[i]
        which = (
            8 - bins[min(best - second, MAX_MARGIN)]  # type: ignore[call-overload]
            if rank == 0
            else bins[min(best - values[i], MAX_MARGIN)]
        )
        candidates.features[to, i] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + which
