"""What may follow a context, why, and how often such came true: compiled by Numba.

Everything is integer arithmetic, so equal inputs give equal estimates on every replica. Probabilities are fixed point,
ONE being certain.

Letters: K runners-up, T nodes in the tree, F features, C candidates of a context at most.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from lp_runtime.lookahead.drafters.best_first.tables import (
    MAX_GRAM,
    MAX_MATCH,
    NUM_HASHES,
    NUM_ORDERS,
    K,
    find_slot,
    find_text,
    gumbel,
    margin_of,
    position_key,
)
from lp_runtime.utils.jit import compiled

# Features: what is known of a candidate; acceptance is counted by feature.
NUM_BINS = 9
NUM_RANKS = 4
NUM_NOISE_BINS = 4
NUM_LENGTHS = 10
PER_ORDER = NUM_RANKS * NUM_BINS
TEXT_FEATURES = NUM_LENGTHS * NUM_NOISE_BINS
POSITION_FEATURES = TEXT_FEATURES + (NUM_ORDERS + 1) * PER_ORDER
NUM_FEATURES = POSITION_FEATURES + 2 * K
SOURCES = ("text", *(f"runners-up {order + 1}" for order in range(NUM_ORDERS)), "vocabulary", "drawn")
MAX_VALUE = 1 << 20
NUM_ROWS = NUM_ORDERS + 3  # of candidates: from the text, of each order (or of the vocabulary), drawn with and without
MAX_CANDIDATES = NUM_ROWS * K

ONE_BITS = 16
ONE = 1 << ONE_BITS
PRIOR_WEIGHT = 8  # observations that a prior estimate counts for
NUM_LEVELS = 16  # of an estimate
MAX_AGREEING = 3  # features that name the same token, counted so far
NUM_PROMISES = MAX_AGREEING * NUM_LEVELS
PROMISE_WEIGHT = 4  # tokens that an estimate of each level is taken to have promised, and kept, before any were seen

# [F] int64 each: how often a candidate with a feature was there, and was what came; the estimate, of ONE, and the one
# before any was seen. [NUM_PROMISES] each: what the best estimates of candidates added up to, by their level and by how
# many features agreed, of ONE; how many of those candidates came. [MAX_AGREEING, F] an estimate as experience with
# estimates like it says, of ONE; [F] the highest of these.
Rates = namedtuple("Rates", "tried taken rate prior promised came kept most")
# Of the nodes of a tree: [4, T] int64, tokens, parents, depths and path_probabilities, which is the estimated probability that a
# node is on the accepted path; each of these again, [T]; [T] sources; [T, NUM_HASHES] the hashes that end at each.
Nodes = namedtuple("Nodes", "rows tokens parents depths path_probabilities sources hashes")
# Candidates of a context. As they are collected, a row for each source, [NUM_ROWS, K] int32: tokens, -1 where there is
# none, and features; the tokens again, [C]. With one of those of the same token, [C] int32 each: tokens, the best
# feature, how many more agree, and which was the first. [K] scratch; [256] bins of gaps.
Candidates = namedtuple("Candidates", "tokens features flat merged best agreeing first values bins")


def make_candidates() -> Candidates:
    """Room for the candidates of a context."""
    tokens, features = (np.zeros((NUM_ROWS, K), np.int32) for _ in range(2))
    merged = (np.zeros(MAX_CANDIDATES, np.int32) for _ in range(4))
    bins = np.array([score_bin.py_func(gap) for gap in range(256)], np.uint8)
    return Candidates(tokens, features, tokens.reshape(-1), *merged, np.zeros(K, np.int32), bins)


def make_nodes(num_nodes: int) -> Nodes:
    """Room for the nodes of a tree."""
    rows = np.zeros((4, num_nodes), np.int64)
    return Nodes(rows, *rows, np.zeros(num_nodes, np.int64), np.zeros((num_nodes, NUM_HASHES), np.int64))


@compiled
def score_bin(score):
    """Bin of a log-probability (negated), or of a distance between two perturbed ones."""
    if score < 5:
        return 0 if score < 1 else (1 if score < 2 else 2)
    if score < 22:
        return 3 if score < 11 else 4
    if score < 64:
        return 5 if score < 40 else 6
    return 7 if score < 96 else 8


@compiled
def length_bin(length):
    """Bin of the length of a match of text."""
    if length <= 6:
        return length - 1
    if length <= 8:
        return 6
    return 7 if length <= 12 else (8 if length <= 20 else 9)


@compiled
def match_text(text, nodes, root, node):
    """(place, length) of what followed the longest match of the context that ends at a node; length 0 without one."""
    found, length = find_text(text, nodes.hashes, node)
    if length < MAX_GRAM:
        return found, length
    last = len(text.buffer) - 1
    most = min(MAX_MATCH, found)
    at, place = node, text.span[1] - 1
    for length in range(most):
        if at > root:
            token = nodes.tokens[at]
            at = nodes.parents[at]
        else:  # the root is the text's last token
            if place < text.span[0]:
                return found, length
            token = text.buffer[place & last]
            place -= 1
        if text.buffer[(found - 1 - length) & last] != token:
            return found, length
    return found, most


@compiled
def collect(drafts, noise, position, nodes, root, node, candidates):
    """What may follow a node, and why: writes tokens and features, the same token maybe several times.

    Args:
        position: absolute position of what follows.

    Returns:
        how many rows were written.
    """
    # Rows of a fixed length, whose loops are compiled to vector instructions.
    text, tokens, features = drafts.text, candidates.tokens, candidates.features
    num_rows = 0
    place, length = match_text(text, nodes, root, node)
    if length:
        token = text.buffer[place & (len(text.buffer) - 1)]
        noise_bin = 0
        if noise.is_on:
            value = gumbel(noise, position, token)
            noise_bin = 0 if value < 0 else (1 if value < 16 else (2 if value < 40 else 3))
        for rank in range(K):
            tokens[0, rank] = -1
        tokens[0, 0] = token
        features[0, 0] = length_bin(length) * NUM_NOISE_BINS + noise_bin
        num_rows = 1
    base = TEXT_FEATURES
    knows_token = False
    table = drafts.top_k
    for order in range(NUM_ORDERS):
        key = nodes.hashes[node, order + 1]
        slot = find_slot(table.keys, key) if key != 0 else -1
        if slot < 0:
            break
        knows_token = True
        collect_entry(table.entries, slot, base + order * PER_ORDER, noise, position, candidates, num_rows)
        num_rows += 1
    token = nodes.tokens[node]
    if not knows_token and token < len(drafts.vocabulary):
        base += NUM_ORDERS * PER_ORDER
        collect_entry(drafts.vocabulary, token, base, noise, position, candidates, num_rows)
        num_rows += 1
    for with_token in range(2):
        slot = find_slot(table.keys, position_key(text, position, token if with_token else -1))
        if slot >= 0:
            for rank in range(K):
                tokens[num_rows, rank] = table.entries[slot, rank]
                features[num_rows, rank] = POSITION_FEATURES + with_token * K + rank
            num_rows += 1
    return num_rows


@compiled
def collect_entry(entries, row, base, noise, position, candidates, to):
    """Write an entry's runners-up to a row, by rank and gap: of log-probabilities or, with noise, of perturbed ones."""
    features, bins = candidates.features, candidates.bins
    for rank in range(K):
        candidates.tokens[to, rank] = entries[row, rank]
    if noise.is_on:
        rank_drawn(entries, row, base, noise, position, candidates, to)
        return
    for rank in range(K):
        features[to, rank] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + bins[margin_of(entries, row, rank)]
    features[to, 0] = base + 8 - bins[margin_of(entries, row, 1)]  # a wide margin is as a high probability


@compiled
def rank_drawn(entries, row, base, noise, position, candidates, to):
    """Write the features of an entry's runners-up where there is noise."""
    values, bins = candidates.values, candidates.bins
    best, second = np.int32(-MAX_VALUE), np.int32(-MAX_VALUE)
    for i in range(K):
        values[i] = -MAX_VALUE - i
        if entries[row, i] >= 0:
            values[i] = gumbel(noise, position, entries[row, i]) - margin_of(entries, row, i)
        second = max(second, min(best, values[i]))
        best = max(best, values[i])
    for i in range(K):
        rank = 0
        for j in range(i):
            rank += values[j] >= values[i]
        for j in range(i + 1, K):
            rank += values[j] > values[i]
        which = 8 - bins[min(best - second, 255)] if rank == 0 else bins[min(best - values[i], 255)]
        candidates.features[to, i] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + which


@compiled
def source_of(feature):
    """Which source a feature speaks of: see SOURCES."""
    if feature < TEXT_FEATURES:
        return 0
    if feature >= POSITION_FEATURES:
        return NUM_ORDERS + 2
    return 1 + (feature - TEXT_FEATURES) // PER_ORDER


@compiled
def level_of(rate):
    """Which of NUM_LEVELS an estimate is in: eight above a half, and one for each halving below."""
    if 2 * rate >= ONE:
        return NUM_LEVELS // 2 + min(NUM_LEVELS // 2 - 1, (2 * rate - ONE) * (NUM_LEVELS // 2) // ONE)
    level = NUM_LEVELS // 2 - 1
    while level > 0 and 4 * rate < ONE:
        rate *= 2
        level -= 1
    return level


@compiled
def merge(rates, candidates, num_rows, least):
    """Make one candidate of those of the same token: of several estimates the best one counts.

    Writes tokens, the feature whose estimate is the best, and how many others agree: the best of several estimates is
    too high as a rule, and the more so the fewer agree. They stand in the order in which they were first collected.

    Args:
        least: tokens whose every estimate is kept below this are left out.

    Returns:
        how many are left.
    """
    flat, merged, first = candidates.flat, candidates.merged, candidates.first
    num, in_order = 0, True
    for row in range(num_rows):
        for rank in range(K):
            feature, token = candidates.features[row, rank], candidates.tokens[row, rank]
            if rates.most[feature] < least or token < 0:  # most are
                continue
            is_known = False
            for i in range(num):
                is_known |= merged[i] == token
            if is_known:
                continue
            naming = 0
            for i in range(num_rows * K):
                naming += flat[i] == token
            merged[num], candidates.best[num], first[num] = token, feature, row * K + rank
            candidates.agreeing[num] = min(naming, MAX_AGREEING) - 1
            if naming > 1:
                choose_best(rates, candidates, num_rows, least, num)
                in_order &= num == 0 or first[num - 1] < first[num]
            num += 1
    if not in_order:
        sort_merged(candidates, num)
    return num


@compiled
def choose_best(rates, candidates, num_rows, least, known):
    """Find which of the candidates with a merged one's token has the best estimate, and which was the first."""
    token = candidates.merged[known]
    best, best_rate, best_is_weak, first = candidates.best[known], np.int64(-1), True, -1
    for row in range(num_rows):
        for rank in range(K):
            if candidates.tokens[row, rank] != token:
                continue
            feature = candidates.features[row, rank]
            rate, is_weak = rates.rate[feature], rates.most[feature] < least
            if rate > best_rate or (rate == best_rate and best_is_weak and not is_weak):
                best, best_rate, best_is_weak = feature, rate, is_weak
            if first < 0:
                first = row * K + rank
    candidates.best[known], candidates.first[known] = best, first


@compiled
def sort_merged(candidates, num):
    """Bring merged candidates, which are few, into the order in which they were first collected."""
    merged, best, agreeing, first = candidates.merged, candidates.best, candidates.agreeing, candidates.first
    for i in range(1, num):
        at = i
        while at > 0 and first[at - 1] > first[at]:
            for values in (merged, best, agreeing, first):
                values[at - 1], values[at] = values[at], values[at - 1]
            at -= 1


@compiled
def promise_of(rate, agreeing):
    """Which of NUM_PROMISES an estimate is, with so many others that agree."""
    return agreeing * NUM_LEVELS + level_of(rate)


@compiled
def weigh(rates):
    """Bring `kept` up to date, what experience with estimates makes of each; returns the highest that it makes."""
    best = np.int64(0)
    for feature in range(NUM_FEATURES):
        rate, most = rates.rate[feature], np.int64(0)
        for agreeing in range(MAX_AGREEING):
            promise = promise_of(rate, agreeing)
            promised = rates.promised[promise] + PROMISE_WEIGHT * ONE
            factor = (rates.came[promise] + PROMISE_WEIGHT << 2 * ONE_BITS) // promised
            kept = min(rate * factor >> ONE_BITS, ONE)
            rates.kept[agreeing, feature] = kept
            most = max(most, kept)
        rates.most[feature] = most
        best = max(best, most)
    return best


@compiled
def learn(drafts, noise, position, nodes, root, path, run, rates, candidates):
    """Count, for each feature of each candidate along a committed run, whether it was the token that came.

    Args:
        position: of the run's first token.
        path: the nodes before each of the run's tokens, the root first.
        run: committed tokens.
    """
    for i in range(len(run)):
        num_rows = collect(drafts, noise, position + i, nodes, root, path[i], candidates)
        for row in range(num_rows):
            for rank in range(K):
                if candidates.tokens[row, rank] >= 0:
                    feature = candidates.features[row, rank]
                    rates.tried[feature] += 1
                    rates.taken[feature] += candidates.tokens[row, rank] == run[i]
        for j in range(merge(rates, candidates, num_rows, 0)):
            rate = rates.rate[candidates.best[j]]
            promise = promise_of(rate, candidates.agreeing[j])
            rates.promised[promise] += rate
            rates.came[promise] += candidates.merged[j] == run[i]
        for row in range(num_rows):
            for rank in range(K):
                if candidates.tokens[row, rank] >= 0:
                    estimate(rates, candidates.features[row, rank])


@compiled
def estimate(rates, feature):
    """Bring the estimate of a feature up to what was counted."""
    tried, taken = rates.tried[feature], rates.taken[feature]
    rates.rate[feature] = (taken * ONE + rates.prior[feature] * PRIOR_WEIGHT) // (tried + PRIOR_WEIGHT)
