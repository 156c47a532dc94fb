"""The inner loops of drafting, compiled by Numba: tables of runners-up and of text, candidates of a context, the tree.

Everything is integer arithmetic (the noise's logarithms are rounded at once), so equal inputs make equal trees on every
replica. Probabilities are fixed point, ONE being certain; a token's gap is how far its log-probability
lies below the likeliest one's, in sixteenths of a nat.

Letters: J orders of runners-up, K runners-up, T nodes in the tree, B tokens in the buffer of text, F features.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np

from lp_runtime.lookahead.compiled import compiled

K = 8
ENTRY = 16
GAPS, STAMP = K, K + K // 4
WAYS = 4  # slots of a bucket; the oldest of them is overwritten
MAX_GRAM = 6  # tokens of the longest n-gram in the index of text
MAX_MATCH = 24  # tokens that a match of text is followed back
CONTEXT = MAX_MATCH + 1
UNKNOWN = -1  # a token that is not there

# Features: what is known of a candidate; acceptance is counted by feature.
NUM_BINS = 9
NUM_RANKS = 4
NUM_NOISE_BINS = 4
NUM_LENGTHS = 10
PER_ORDER = NUM_RANKS * NUM_BINS
NUM_ORDERS = 4
TEXT_FEATURES = NUM_LENGTHS * NUM_NOISE_BINS
POSITION_FEATURES = TEXT_FEATURES + (NUM_ORDERS + 1) * PER_ORDER
NUM_FEATURES = POSITION_FEATURES + 2 * K
SOURCES = ("text", *(f"runners-up {order + 1}" for order in range(NUM_ORDERS)), "vocabulary", "drawn")
MAX_VALUE = 1 << 20
SCORE_UNIT = 16  # a nat

ONE_BITS = 16
ONE = 1 << ONE_BITS
PROBABILITY_BITS = 40  # of a path
SEQUENCE_BITS = 20
MAX_PUSHED = (1 << SEQUENCE_BITS) - 1

WORD = 0xFFFFFFFF

# Runners-up by hashed context: [slots] int64, and an entry for each, [slots, ENTRY] int32, one line of a cache: K
# tokens, the likeliest first, -1 where there are fewer; their K gaps, a byte each; the age.
RunnersUp = namedtuple("RunnersUp", "keys entries")
# The buffer of text, a ring, [B] int32; where the request's text begins and ends in it, [2] int64; the place after an
# n-gram's last occurrence by its hash: [slots] int64 each.
Text = namedtuple("Text", "buffer span keys places")
# What follows each token alone: [V, ENTRY] entries; V is 0 where there is none.
# All of the above.
Drafts = namedtuple("Drafts", "runners_up text vocabulary")
# [F] int64 each: how often a candidate with a feature was there, and was what came; the estimate, of ONE.
Rates = namedtuple("Rates", "tried taken rate")
# Whether successors are drawn with noise; the key and the sample of it.
Noise = namedtuple("Noise", "is_on key0 key1 sample")


@compiled
def mix(value):
    """Scramble 64 bits (the finalizer of splitmix64, with arithmetic shifts)."""
    value = (value ^ (value >> 30)) * np.int64(-4658895280553007687)
    value = (value ^ (value >> 27)) * np.int64(-7723592293110705685)
    return value ^ (value >> 31)


@compiled
def extend_hash(value, token):
    """Hash of a context that is one token longer to the left."""
    value = mix(value * np.int64(31) + token + np.int64(0x632BE5AB))
    return value if value != 0 else np.int64(1)  # 0 is an empty slot


@compiled
def find_slot(keys, key):
    """The slot of a key, or -1."""
    first = (key & (len(keys) // WAYS - 1)) * WAYS
    for slot in range(first, first + WAYS):
        if keys[slot] == key:
            return slot
    return -1


@compiled
def take_slot(keys, ages, key):
    """The slot of a key; if it has none, an empty one of its bucket, or the one of the least age."""
    first = (key & (len(keys) // WAYS - 1)) * WAYS
    for slot in range(first, first + WAYS):
        if keys[slot] == key or keys[slot] == 0:
            return slot
    best = first
    for slot in range(first + 1, first + WAYS):
        if ages[slot] < ages[best]:
            best = slot
    return best


@compiled
def gap_of(entry, rank):
    """The gap of a rank."""
    return np.int64((entry[GAPS + (rank >> 2)] >> (8 * (rank & 3))) & 255)


@compiled
def gumbel(noise, position, token):
    """Gumbel noise of a token that may be drawn at an absolute position, in sixteenths of a nat (see sampling.py)."""
    even0, odd0 = np.int64(token >> 1), np.int64(position)
    even1, odd1 = np.int64(noise.sample), np.int64(0)
    key0, key1 = noise.key0, noise.key1
    for _ in range(10):
        product0, product1 = even0 * np.int64(0xD2511F53), even1 * np.int64(0xCD9E8D57)
        even0, even1 = ((product1 >> 32) & WORD) ^ odd0 ^ key0, ((product0 >> 32) & WORD) ^ odd1 ^ key1
        odd0, odd1 = product1 & WORD, product0 & WORD
        key0, key1 = (key0 + np.int64(0x9E3779B9)) & WORD, (key1 + np.int64(0xBB67AE85)) & WORD
    high, low = (even1, odd1) if token & 1 else (even0, odd0)
    uniform = (float(((high >> 6) << 26) | (low >> 6)) + 0.5) * 2.0**-52
    return np.int64(math.floor(-math.log(-math.log(uniform)) * SCORE_UNIT + 0.5))


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
def fill_context(text, tokens, parents, root, node, context):
    """The tokens up to a node, the latest first; returns how many. Text before the request's is not seen."""
    size = 0
    while node != root:
        context[size] = tokens[node]
        size += 1
        node = parents[node]
        if size == CONTEXT:
            return size
    place = text.span[1] - 1  # the root
    while place >= text.span[0] and size < CONTEXT:
        context[size] = text.buffer[place % len(text.buffer)]
        size += 1
        place -= 1
    return size


@compiled
def match_text(text, context, size):
    """(place, length) of what followed the longest match of the context in the text; length 0 without one."""
    key = np.int64(0)
    found, length = np.int64(-1), 0
    for i in range(min(size, MAX_GRAM)):
        key = extend_hash(key, context[i])
        slot = find_slot(text.keys, key)
        if slot < 0:
            break
        place = text.places[slot]
        if place <= text.span[1] - len(text.buffer) + MAX_MATCH:
            break
        found, length = place, i + 1
    if length == MAX_GRAM:
        most = min(size, MAX_MATCH, found)
        while length < most and text.buffer[(found - 1 - length) % len(text.buffer)] == context[length]:
            length += 1
    return found, length


@compiled
def collect(drafts, noise, position, context, size, found, features, values):
    """What may follow a context, and why: writes tokens and features, the same token maybe several times.

    Args:
        position: absolute position of what follows.
        found, features: written, room for all sources' candidates.
        values: [K] scratch.

    Returns:
        how many were written.
    """
    text = drafts.text
    count = 0
    place, length = match_text(text, context, size)
    if length:
        token = text.buffer[place % len(text.buffer)]
        noise_bin = 0
        if noise.is_on:
            value = gumbel(noise, position, token)
            noise_bin = 0 if value < 0 else (1 if value < 16 else (2 if value < 40 else 3))
        found[count] = token
        features[count] = length_bin(length) * NUM_NOISE_BINS + noise_bin
        count += 1
    base = TEXT_FEATURES
    key = np.int64(0)
    knows_token = False
    table = drafts.runners_up
    for order in range(min(NUM_ORDERS, size)):
        key = extend_hash(key, context[order])
        slot = find_slot(table.keys, key)
        if slot < 0:
            break
        knows_token = True
        count = collect_entry(
            table.entries[slot], base + order * PER_ORDER, noise, position, found, features, values, count
        )
    token = context[0]
    if not knows_token and token < len(drafts.vocabulary):
        base += NUM_ORDERS * PER_ORDER
        count = collect_entry(drafts.vocabulary[token], base, noise, position, found, features, values, count)
    for with_token in range(2):
        slot = find_slot(table.keys, position_key(text, position, token if with_token else -1))
        if slot >= 0:
            for rank in range(K):
                if table.entries[slot, rank] < 0:
                    break
                found[count] = table.entries[slot, rank]
                features[count] = POSITION_FEATURES + with_token * K + rank
                count += 1
    return count


@compiled
def position_key(text, position, token):
    """Key of what was drawn at an absolute position of this request's text: after a token, or, with -1, after any."""
    return extend_hash(extend_hash(np.int64(1 << 40), position), text.span[0] + (np.int64(token) << 32))


@compiled
def note_drawn(table, key, token, stamp):
    """Put a token to the front of what was drawn at a position."""
    slot = take_slot(table.keys, table.entries[:, STAMP], key)
    entry = table.entries[slot]
    if table.keys[slot] != key:
        table.keys[slot] = key
        entry[:K] = -1
    entry[STAMP] = stamp
    held = token
    for rank in range(K):
        held, entry[rank] = entry[rank], held
        if held == token or held < 0:
            break


@compiled
def collect_entry(entry, base, noise, position, found, features, values, count):
    """The runners-up of one entry by rank and gap: of log-probabilities or, with noise, of perturbed ones."""
    num = 0
    while num < K and entry[num] >= 0:
        found[count + num] = entry[num]
        num += 1
    if not noise.is_on:
        for rank in range(num):
            # The first one's gap is its margin: a wide one is as a high probability.
            which = 8 - score_bin(gap_of(entry, 1)) if rank == 0 else score_bin(gap_of(entry, rank))
            features[count + rank] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + which
        return count + num
    best, second = np.int64(-MAX_VALUE), np.int64(-MAX_VALUE)
    for i in range(num):
        values[i] = gumbel(noise, position, entry[i]) - gap_of(entry, i)
        if values[i] > best:
            best, second = values[i], best
        elif values[i] > second:
            second = values[i]
    for i in range(num):
        rank = 0
        for j in range(num):
            if values[j] > values[i] or (values[j] == values[i] and j < i):
                rank += 1
        which = 8 - score_bin(best - second) if rank == 0 else score_bin(best - values[i])
        features[count + i] = base + min(rank, NUM_RANKS - 1) * NUM_BINS + which
    return count + num


@compiled
def learn(drafts, noise, position, tokens, parents, root, path, run, rates, scratch):
    """Count, for each feature of each candidate along a committed run, whether it was the token that came.

    Args:
        position: of the run's first token.
        path: the nodes before each of the run's tokens, the root first.
        run: committed tokens.
    """
    context, found, features, values = scratch
    for i in range(len(run)):
        size = fill_context(drafts.text, tokens, parents, root, path[i], context)
        count = collect(drafts, noise, position + i, context, size, found, features, values)
        for j in range(count):
            rates.tried[features[j]] += 1
            rates.taken[features[j]] += found[j] == run[i]


@compiled
def remember(drafts, position, tokens, parents, depths, root, successors, entries, stamp, scratch):
    """Store what was found at all nodes from the root on, each under its last tokens; the first nodes win.

    Args:
        position: absolute position of what follows the root.
        successors: [n] what was drawn, by node from the root on.
        entries: [n, ENTRY] runners-up.
    """
    context = scratch[0]
    table = drafts.runners_up
    ages = table.entries[:, STAMP]
    for i in range(len(entries) - 1, -1, -1):
        entries[i, STAMP] = stamp
        node = root + i
        size = fill_context(drafts.text, tokens, parents, root, node, context)
        key = np.int64(0)
        for order in range(min(NUM_ORDERS, size)):
            key = extend_hash(key, context[order])
            slot = take_slot(table.keys, ages, key)
            table.keys[slot] = key
            table.entries[slot] = entries[i]
        place = position + depths[node]
        note_drawn(table, position_key(drafts.text, place, tokens[node]), successors[i], stamp)
        note_drawn(table, position_key(drafts.text, place, -1), successors[i], stamp)


@compiled
def append_text(text, tokens):
    """Append committed tokens, and note for every n-gram that ends before each of them that it follows."""
    size = len(text.buffer)
    for i in range(len(tokens)):
        end = text.span[1]
        key = np.int64(0)
        for length in range(min(MAX_GRAM, end - text.span[0])):
            key = extend_hash(key, text.buffer[(end - 1 - length) % size])
            slot = take_slot(text.keys, text.places, key)
            text.keys[slot] = key
            text.places[slot] = end
        text.buffer[end % size] = tokens[i]
        text.span[1] = end + 1


@compiled
def source_of(feature):
    """Which source a feature speaks of: see SOURCES."""
    if feature < TEXT_FEATURES:
        return 0
    if feature >= POSITION_FEATURES:
        return NUM_ORDERS + 2
    return 1 + (feature - TEXT_FEATURES) // PER_ORDER


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
def grow(drafts, noise, position, rates, nodes, root, max_nodes, max_depth, pushed, scratch):
    """Grow a tree best first: of all candidates below all nodes, always the one that is likeliest to be reached.

    Args:
        position: absolute position of what follows the root.
        rates: of acceptance by feature.
        nodes: tokens, parents, depths, reach and sources, [>= max_nodes] each, filled up to the root; reach is the
            estimated probability that a node is on the accepted path, fixed point of PROBABILITY_BITS.
        root: index of the root.
        max_nodes: nodes at most, the pending tokens included.
        max_depth: none stands deeper.
        pushed: scratch for the candidates: heap keys, parents, tokens, sources.

    Returns:
        T, the number of nodes.
    """
    context, found, features, values = scratch
    tokens, parents, depths, reach, sources = nodes
    heap, pushed_parents, pushed_tokens, pushed_sources = pushed
    num_nodes = root + 1
    num_pushed = heap_size = 0
    node = root
    reach[root] = np.int64(1) << PROBABILITY_BITS
    while True:
        if depths[node] < max_depth:
            size = fill_context(drafts.text, tokens, parents, root, node, context)
            count = collect(drafts, noise, position + depths[node], context, size, found, features, values)
            for i in range(count):  # of the same token the best reason counts
                rate = rates.rate[features[i]]
                values[i] = source_of(features[i])
                for j in range(i):
                    if found[j] == found[i]:
                        if rate > features[j]:
                            features[j], values[j] = rate, values[i]
                        rate = 0
                        break
                features[i] = rate
            for i in range(count):
                if features[i] > 0 and num_pushed < len(heap):
                    estimate = (reach[node] >> ONE_BITS) * features[i]
                    heap[heap_size] = (estimate << SEQUENCE_BITS) | (MAX_PUSHED - num_pushed)
                    pushed_parents[num_pushed] = node
                    pushed_tokens[num_pushed] = found[i]
                    pushed_sources[num_pushed] = values[i]
                    num_pushed += 1
                    heap_size += 1
                    sift_up(heap, heap_size - 1)
        if heap_size == 0 or num_nodes >= max_nodes:
            return num_nodes
        top = pop(heap, heap_size)
        heap_size -= 1
        index = MAX_PUSHED - (top & MAX_PUSHED)
        node = num_nodes
        tokens[node] = pushed_tokens[index]
        parents[node] = pushed_parents[index]
        sources[node] = pushed_sources[index]
        depths[node] = depths[parents[node]] + 1
        reach[node] = top >> SEQUENCE_BITS
        num_nodes += 1
