"""What may follow a context, why, and how often such came true: compiled by Numba.

Everything is integer arithmetic, so equal inputs give equal estimates on every replica. Probabilities are fixed point,
ONE being certain.

Letters: K runners-up, T nodes in the tree, F features, C candidates of a context.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from lp_runtime.lookahead.compiled import compiled
from lp_runtime.lookahead.tables import (
    MAX_GRAM,
    MAX_MATCH,
    NUM_HASHES,
    NUM_ORDERS,
    K,
    find_slot,
    find_text,
    gap_of,
    gumbel,
    position_key,
)

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
MAX_CANDIDATES = 1 + K * (NUM_ORDERS + 3)  # C at most, of all sources

ONE_BITS = 16
ONE = 1 << ONE_BITS
PRIOR_WEIGHT = 8  # observations that a prior estimate counts for
NUM_LEVELS = 16  # of an estimate
MAX_AGREEING = 3  # features that name the same token, counted so far
NUM_PROMISES = MAX_AGREEING * NUM_LEVELS
PROMISE_WEIGHT = 4  # tokens that an estimate of each level is taken to have promised, and kept, before any were seen
NUM_MARKS = 256

# [F] int64 each: how often a candidate with a feature was there, and was what came; the estimate, of ONE, and the one
# before any was seen. [NUM_PROMISES] each: what the best estimates of candidates added up to, by their level and by how
# many features agreed, of ONE; how many of those candidates came. [MAX_AGREEING, F] an estimate as experience with
# estimates like it says, of ONE; [F] the highest of these.
Rates = namedtuple("Rates", "tried taken rate prior promised came kept most")
# [T] each: tokens, parents, depths, reach and sources of the nodes of a tree, reach being the estimated probability
# that a node is on the accepted path; [T, NUM_HASHES] the hashes that end at each.
Nodes = namedtuple("Nodes", "tokens parents depths reach sources hashes")
# Candidates of a context: [MAX_CANDIDATES] each, tokens and features as they were collected; then, with one of those of
# the same token, tokens, the best feature, how many more agree, and which was the first; scratch. [256] bins of gaps.
Candidates = namedtuple("Candidates", "tokens features merged best agreeing first values marks bins")


def make_candidates() -> Candidates:
    """Room for the candidates of a context."""
    arrays = (np.zeros(MAX_CANDIDATES, np.int64) for _ in range(7))
    bins = np.array([score_bin.py_func(gap) for gap in range(256)])
    return Candidates(*arrays, np.zeros(NUM_MARKS + 1, np.int64), bins)


def make_nodes(num_nodes: int) -> Nodes:
    """Room for the nodes of a tree."""
    return Nodes(*(np.zeros(num_nodes, np.int64) for _ in range(5)), np.zeros((num_nodes, NUM_HASHES), np.int64))


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
        how many were written.
    """
    text = drafts.text
    count = 0
    place, length = match_text(text, nodes, root, node)
    if length:
        token = text.buffer[place & (len(text.buffer) - 1)]
        noise_bin = 0
        if noise.is_on:
            value = gumbel(noise, position, token)
            noise_bin = 0 if value < 0 else (1 if value < 16 else (2 if value < 40 else 3))
        candidates.tokens[count] = token
        candidates.features[count] = length_bin(length) * NUM_NOISE_BINS + noise_bin
        count += 1
    base = TEXT_FEATURES
    knows_token = False
    table = drafts.runners_up
    for order in range(NUM_ORDERS):
        key = nodes.hashes[node, order + 1]
        slot = find_slot(table.keys, key) if key != 0 else -1
        if slot < 0:
            break
        knows_token = True
        count = collect_entry(table.entries, slot, base + order * PER_ORDER, noise, position, candidates, count)
    token = nodes.tokens[node]
    if not knows_token and token < len(drafts.vocabulary):
        base += NUM_ORDERS * PER_ORDER
        count = collect_entry(drafts.vocabulary, token, base, noise, position, candidates, count)
    for with_token in range(2):
        slot = find_slot(table.keys, position_key(text, position, token if with_token else -1))
        if slot >= 0:
            for rank in range(K):
                if table.entries[slot, rank] < 0:
                    break
                candidates.tokens[count] = table.entries[slot, rank]
                candidates.features[count] = POSITION_FEATURES + with_token * K + rank
                count += 1
    return count


@compiled
def collect_entry(entries, row, base, noise, position, candidates, count):
    """The runners-up of one entry by rank and gap: of log-probabilities or, with noise, of perturbed ones."""
    found, features, values, bins = candidates.tokens, candidates.features, candidates.values, candidates.bins
    if not noise.is_on:
        for rank in range(K):
            token = entries[row, rank]
            if token < 0:
                break
            # The first one's gap is its margin: a wide one is as a high probability.
            which = 8 - bins[gap_of(entries, row, 1)] if rank == 0 else bins[gap_of(entries, row, rank)]
            found[count] = token
            features[count] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + which
            count += 1
        return count
    best, second = np.int64(-MAX_VALUE), np.int64(-MAX_VALUE)
    num = 0
    while num < K and entries[row, num] >= 0:
        value = gumbel(noise, position, entries[row, num]) - gap_of(entries, row, num)
        if value > best:
            best, second = value, best
        elif value > second:
            second = value
        values[num] = value
        num += 1
    for i in range(num):
        rank = 0
        for j in range(num):
            rank += values[j] > values[i] or (values[j] == values[i] and j < i)
        which = 8 - score_bin(best - second) if rank == 0 else score_bin(best - values[i])
        found[count] = entries[row, i]
        features[count] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + which
        count += 1
    return count


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
def merge(rates, candidates, count, least):
    """Make one candidate of those of the same token: of several estimates the best one counts.

    Writes tokens, the feature whose estimate is the best, and how many others agree: the best of several estimates is
    too high as a rule, and the more so the fewer agree. They stand in the order in which they were first collected.

    Args:
        least: tokens whose every estimate is kept below this are left out.

    Returns:
        how many are left.
    """
    marks, first = candidates.marks, candidates.first
    marks[NUM_MARKS] += 1
    stamp = marks[NUM_MARKS] << 8
    num, in_order = 0, True
    for is_weak in range(2):  # most are: they are only looked up among the others
        for i in range(count):
            feature = candidates.features[i]
            if (rates.most[feature] < least) != is_weak:
                continue
            token = candidates.tokens[i]
            at = (token * 40503 >> 4) & (NUM_MARKS - 1)
            while marks[at] >= stamp and candidates.merged[marks[at] - stamp] != token:
                at = (at + 1) & (NUM_MARKS - 1)
            if marks[at] >= stamp:
                known = marks[at] - stamp
                candidates.agreeing[known] = min(candidates.agreeing[known] + 1, MAX_AGREEING - 1)
                if rates.rate[feature] > rates.rate[candidates.best[known]]:
                    candidates.best[known] = feature
                if i < first[known]:
                    first[known], in_order = i, False
            elif not is_weak:
                marks[at] = stamp + num
                candidates.merged[num], candidates.best[num], candidates.agreeing[num] = token, feature, 0
                first[num] = i
                num += 1
        if num == 0:
            return 0
    if not in_order:
        sort_merged(candidates, num)
    return num


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
        count = collect(drafts, noise, position + i, nodes, root, path[i], candidates)
        for j in range(count):
            feature = candidates.features[j]
            rates.tried[feature] += 1
            rates.taken[feature] += candidates.tokens[j] == run[i]
        for j in range(merge(rates, candidates, count, 0)):
            rate = rates.rate[candidates.best[j]]
            promise = promise_of(rate, candidates.agreeing[j])
            rates.promised[promise] += rate
            rates.came[promise] += candidates.merged[j] == run[i]
        for j in range(count):
            estimate(rates, candidates.features[j])


@compiled
def estimate(rates, feature):
    """Bring the estimate of a feature up to what was counted."""
    tried, taken = rates.tried[feature], rates.taken[feature]
    rates.rate[feature] = (taken * ONE + rates.prior[feature] * PRIOR_WEIGHT) // (tried + PRIOR_WEIGHT)
