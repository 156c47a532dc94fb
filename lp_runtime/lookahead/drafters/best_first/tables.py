"""Tables that drafts are made from, and the noise of sampling, for code compiled by Numba.

Contexts are known by the hashes of their last 1, 2, 3 ... tokens. A token's gap is how far its log-probability lies
below the likeliest one's, in sixteenths of a nat. Everything is integer arithmetic (the noise's logarithms are rounded
at once), so equal inputs give equal tables on every replica.

Letters: J orders of runners-up, K runners-up, B tokens in the buffer of text.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np

from lp_runtime.utils.jit import compiled

K = 8
ENTRY = 16
MARGINS, STAMP = K, K + K // 4
WAYS = 4  # slots of a bucket; the oldest of them is overwritten
MAX_GRAM = 6  # tokens of the longest n-gram in the index of text
MAX_MATCH = 24  # tokens that a match of text is followed back
NUM_HASHES = MAX_GRAM + 1  # of a context: of its last 0, 1, 2 ... tokens; 0 where it has fewer
EMPTY_HASH = 1  # of no tokens
NUM_ORDERS = 4
SCORE_UNIT = 16  # a nat
NOISE_KEPT = 1 << 13  # values of noise that are kept
NOISE_BITS = 12  # of each: noise is between -59 and 588 sixteenths
ID_BITS = 24  # of a token

WORD = 0xFFFFFFFF

# Runners-up by hashed context: [slots] int64, and an entry for each, [slots, ENTRY] int32, one line of a cache: K
# tokens, the likeliest first, -1 where there are fewer; their K gaps, a byte each; the age.
TopKTable = namedtuple("TopKTable", "keys entries")
# The buffer of text, a ring, [B] int32; where the request's text begins and ends in it, [2] int64; the hashes at its
# end, [1, NUM_HASHES]; the place after an n-gram's last occurrence by its hash: [slots] and [slots, 1] int64.
Text = namedtuple("Text", "buffer span hashes keys places")
# What follows each token alone: [V, ENTRY] entries; V is 0 where there is none.
# All of the above.
DraftArrays = namedtuple("DraftArrays", "top_k text vocabulary")
# Whether successors are drawn with noise; the key and the sample of it; values that were made lately, with position and
# token, [NOISE_KEPT] int64.
Noise = namedtuple("Noise", "is_on key0 key1 sample kept")


def make_noise(is_on: bool, seed: int, sample: int) -> Noise:
    """The noise of one sample; seed and sample as sampling.py has them."""
    return Noise(is_on, seed & WORD, seed >> 32, sample, np.full(NOISE_KEPT, -1, np.int64))


@compiled
def mix(value):
    """Scramble 64 bits (the finalizer of splitmix64, with arithmetic shifts)."""
    value = (value ^ (value >> 30)) * np.int64(-4658895280553007687)
    value = (value ^ (value >> 27)) * np.int64(-7723592293110705685)
    return value ^ (value >> 31)


@compiled
def extend_hash(value, token):
    """Hash of a context with one token more at its end."""
    value = mix(value * np.int64(31) + token + np.int64(0x632BE5AB))
    return value if value != 0 else np.int64(1)  # 0 is an empty slot


@compiled
def extend_hashes(rows, row, token, extended_rows, extended):
    """All hashes of a context, a row of several, with one token more at its end: to a row, maybe the same one."""
    # Rows by number: views would be counted references, which cost more than the hashes.
    for length in range(MAX_GRAM, 0, -1):
        before = rows[row, length - 1]
        extended_rows[extended, length] = extend_hash(before, token) if before != 0 else 0
    extended_rows[extended, 0] = EMPTY_HASH


@compiled
def find_slot(keys, key):
    """The slot of a key, or -1."""
    first = (key & (len(keys) // WAYS - 1)) * WAYS
    for slot in range(first, first + WAYS):
        if keys[slot] == key:
            return slot
    return -1


@compiled
def take_slot(keys, rows, column, key):
    """The slot of a key; if it has none, an empty one of its bucket, or the oldest one's, by a column of the rows."""
    first = (key & (len(keys) // WAYS - 1)) * WAYS
    for slot in range(first, first + WAYS):
        if keys[slot] == key or keys[slot] == 0:
            return slot
    best = first
    for slot in range(first + 1, first + WAYS):
        if rows[slot, column] < rows[best, column]:
            best = slot
    return best


@compiled
def margin_of(entries, row, rank):
    """The gap of a rank."""
    return np.int64((entries[row, MARGINS + (rank >> 2)] >> (8 * (rank & 3))) & 255)


@compiled
def make_gumbel(noise, position, token):
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
def gumbel(noise, position, token):
    """The same, from what is kept where it is."""
    of = np.int64(position) << ID_BITS | np.int64(token)
    slot = (position * 1021 + token) & (NOISE_KEPT - 1)
    if noise.kept[slot] >> NOISE_BITS != of:
        value = make_gumbel(noise, position, token)
        noise.kept[slot] = of << NOISE_BITS | (value + (1 << NOISE_BITS - 1))
        return value
    return (noise.kept[slot] & (1 << NOISE_BITS) - 1) - (1 << NOISE_BITS - 1)


@compiled
def find_text(text, rows, row):
    """(place, length) of what followed the longest n-gram that the text and a context's end share; length 0: none."""
    found, length = np.int64(-1), 0
    for i in range(1, NUM_HASHES):
        if rows[row, i] == 0:
            break
        slot = find_slot(text.keys, rows[row, i])
        if slot < 0:
            break
        place = text.places[slot, 0]
        if place <= text.span[1] - len(text.buffer) + MAX_MATCH:
            break
        found, length = place, i
    return found, length


@compiled
def append_text(text, tokens):
    """Append committed tokens, and note for every n-gram that ends before each of them that it follows."""
    last = len(text.buffer) - 1  # a power of two, less one
    for i in range(len(tokens)):
        end = text.span[1]
        for length in range(1, NUM_HASHES):
            key = text.hashes[0, length]
            if key == 0:
                break
            slot = take_slot(text.keys, text.places, 0, key)
            text.keys[slot] = key
            text.places[slot, 0] = end
        text.buffer[end & last] = tokens[i]
        text.span[1] = end + 1
        extend_hashes(text.hashes, 0, tokens[i], text.hashes, 0)


@compiled
def store_entry(table, key, entries, row):
    """Keep runners-up, a row of several, under a key; what is stored later under the same one takes their place."""
    slot = take_slot(table.keys, table.entries, STAMP, key)
    table.keys[slot] = key
    for i in range(STAMP + 1):
        table.entries[slot, i] = entries[row, i]


@compiled
def position_key(text, position, token):
    """Key of what was drawn at an absolute position of this request's text: after a token, or, with -1, after any."""
    return extend_hash(extend_hash(np.int64(1 << 40), position), text.span[0] + (np.int64(token) << 32))


@compiled
def note_drawn(table, key, token, stamp):
    """Put a token to the front of what was drawn at a position."""
    slot = take_slot(table.keys, table.entries, STAMP, key)
    entries = table.entries
    if table.keys[slot] != key:
        table.keys[slot] = key
        for rank in range(K):
            entries[slot, rank] = -1
    entries[slot, STAMP] = stamp
    held = token
    for rank in range(K):
        held, entries[slot, rank] = entries[slot, rank], held
        if held == token or held < 0:
            break
