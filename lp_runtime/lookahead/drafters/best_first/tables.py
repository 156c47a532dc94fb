"""The draft tables' layout, and the sampling noise of single tokens, for code compiled by Numba.

Contexts are looked up by hashes of their last 1, 2, 3 ... tokens. Everything is integer arithmetic (the noise's
logarithms are rounded immediately), so equal inputs give equal tables on every replica.

Letters: K top-k candidates, B tokens in the text buffer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lp_runtime.lookahead.drafter import NoiseKey
from lp_runtime.lookahead.drafters.best_first.corpus import CorpusIndex
from lp_runtime.lookahead.philox import (
    KEY_INCREMENTS,
    MULTIPLIERS,
    NUM_ROUNDS,
    UNIFORM_HALF_BITS,
    UNIFORM_UNIT,
    WORD_BITS,
    WORD_MASK,
)
from lp_runtime.lookahead.top_k import ID_BITS, ORIGIN, STAMP, UNITS_PER_NAT, K, VocabularyPrior
from lp_runtime.utils.jit import Int, compiled, inlined

WAYS = 4  # slots of a bucket; the oldest of them is overwritten
MAX_GRAM = 6  # tokens of the longest n-gram in the text's index
MAX_MATCH = 24  # longest match in the text, in tokens
NUM_HASHES = MAX_GRAM + 1  # hashes of a context's last 0, 1, 2 ... tokens; 0 if it has fewer tokens
EMPTY_HASH = 1  # hash of no tokens
NUM_ORDERS = 4  # longest context, in tokens, that top-k candidates are stored under
NOISE_CACHE_SIZE = 1 << 13  # cached noise values
TEMPERATURE_BITS = 8  # fixed point of 1 / temperature
MAX_INVERSE = 1 << 15  # of 1 / temperature; above it, only the likeliest token can be sampled
NOISE_BITS = 12  # of a cached value: noise is between -59 and 588 sixteenths of a nat


class TopKTable(NamedTuple):
    """Top-k candidates by hash of the context.

    Attributes:
        keys: [slots] int64 hash of the context in each slot; 0 in an empty slot.
        entries: [slots, ENTRY] int32: K token ids, the likeliest first, -1 if there are fewer; their margins; the stamp
            of the step that stored the entry; its origin.
    """

    keys: np.ndarray
    entries: np.ndarray


class TextIndex(NamedTuple):
    """A ring buffer of committed tokens, and an index of the last occurrence of each n-gram.

    Attributes:
        buffer: [B] int32 token ids; B is a power of two.
        span: [2] int64 places where the request's text begins and ends, counted without wrapping around.
        hashes: [1, NUM_HASHES] int64 hashes of the context at the text's end.
        keys: [slots] int64 hash of the n-gram in each slot; 0 in an empty slot.
        places: [slots, 1] int64 place after the n-gram's last occurrence.
        forks: [B] int64 for each token, the place of the last other token that came after the same MAX_GRAM tokens; 0
            for none.
    """

    buffer: np.ndarray
    span: np.ndarray
    hashes: np.ndarray
    keys: np.ndarray
    places: np.ndarray
    forks: np.ndarray


class DraftArrays(NamedTuple):
    """All arrays in which candidates are looked up."""

    top_k: TopKTable
    text: TextIndex
    vocabulary: VocabularyPrior
    corpus: CorpusIndex


class Noise(NamedTuple):
    """The Gumbel noise of one sample.

    Attributes:
        is_on: whether successors are sampled.
        key0, key1: lower and upper word of the seed.
        inverse_temperature: factor of the model's log-probabilities, fixed point of TEMPERATURE_BITS.
        cache: [NOISE_CACHE_SIZE] int64 recently computed values, each packed with its position and token id.
    """

    is_on: bool
    key0: Int
    key1: Int
    sample: int
    inverse_temperature: Int
    cache: np.ndarray


def make_noise(key: NoiseKey | None) -> Noise:
    """Return the noise of one sample; None for greedy decoding."""
    seed, sample, temperature = key or NoiseKey(0, 0)
    inverse = np.int64(round(min(MAX_INVERSE, (1 << TEMPERATURE_BITS) / max(temperature, 1 / MAX_INVERSE))))
    cache = np.full(NOISE_CACHE_SIZE, -1, np.int64)
    return Noise(key is not None, seed & WORD_MASK, seed >> WORD_BITS, sample, inverse, cache)


@inlined
def mix(value: Int) -> Int:
    """Mix the bits of a 64-bit integer (the finalizer of splitmix64, with arithmetic shifts)."""
    value = (value ^ (value >> 30)) * np.int64(-4658895280553007687)
    value = (value ^ (value >> 27)) * np.int64(-7723592293110705685)
    return value ^ (value >> 31)


@inlined
def extend_hash(value: Int, token: Int) -> Int:
    """Return the hash of a context extended by one token."""
    value = mix(value * np.int64(31) + token + np.int64(0x632BE5AB))
    return value if value != 0 else np.int64(1)  # 0 marks empty slots


@inlined
def extend_hashes(rows: np.ndarray, row: Int, token: Int, extended_rows: np.ndarray, extended: Int) -> None:
    """Write all hashes of the context in `rows[row]`, extended by a token, to `extended_rows[extended]`.

    Both arrays are [n, NUM_HASHES] int64, and may be the same.
    """
    # Rows are passed by index: views would be reference-counted, which costs more than the hashes.
    for length in range(MAX_GRAM, 0, -1):
        before = rows[row, length - 1]
        extended_rows[extended, length] = extend_hash(before, token) if before != 0 else 0
    extended_rows[extended, 0] = EMPTY_HASH


@inlined
def find_slot(keys: np.ndarray, key: Int) -> Int:
    """Return the slot of a key, or -1."""
    first = (key & (len(keys) // WAYS - 1)) * WAYS
    for slot in range(first, first + WAYS):
        if keys[slot] == key:
            return slot
    return -1


@inlined
def claim_slot(keys: np.ndarray, rows: np.ndarray, column: Int, key: Int) -> Int:
    """Return the slot to store a key in: its existing slot, else an empty one or the oldest of its bucket.

    `rows[slot, column]` is the age of a slot's content; the smallest is the oldest.
    """
    first = (key & (len(keys) // WAYS - 1)) * WAYS
    for slot in range(first, first + WAYS):
        if keys[slot] == key or keys[slot] == 0:
            return slot
    oldest = first
    for slot in range(first + 1, first + WAYS):
        if rows[slot, column] < rows[oldest, column]:
            oldest = slot
    return oldest


@inlined
def make_gumbel(noise: Noise, position: Int, token: Int) -> Int:
    """Compute a token's Gumbel noise at an absolute position, in sixteenths of a nat (see philox.py)."""
    even0, odd0 = np.int64(token >> 1), np.int64(position)
    even1, odd1 = np.int64(noise.sample), np.int64(0)
    key0, key1 = noise.key0, noise.key1
    for _ in range(NUM_ROUNDS):
        product0, product1 = even0 * np.int64(MULTIPLIERS[0]), even1 * np.int64(MULTIPLIERS[1])
        even0 = ((product1 >> WORD_BITS) & WORD_MASK) ^ odd0 ^ key0
        even1 = ((product0 >> WORD_BITS) & WORD_MASK) ^ odd1 ^ key1
        odd0, odd1 = product1 & WORD_MASK, product0 & WORD_MASK
        key0 = (key0 + np.int64(KEY_INCREMENTS[0])) & WORD_MASK
        key1 = (key1 + np.int64(KEY_INCREMENTS[1])) & WORD_MASK
    high, low = (even1, odd1) if token & 1 else (even0, odd0)
    unused = WORD_BITS - UNIFORM_HALF_BITS
    uniform = (float(((high >> unused) << UNIFORM_HALF_BITS) | (low >> unused)) + 0.5) * UNIFORM_UNIT
    return np.int64(math.floor(-math.log(-math.log(uniform)) * UNITS_PER_NAT + 0.5))


@inlined
def gumbel(noise: Noise, position: Int, token: Int) -> Int:
    """Return a token's Gumbel noise at an absolute position, in sixteenths of a nat; cached."""
    key = np.int64(position) << ID_BITS | np.int64(token)
    slot = (position * 1021 + token) & (NOISE_CACHE_SIZE - 1)
    if noise.cache[slot] >> NOISE_BITS != key:
        value = make_gumbel(noise, position, token)
        noise.cache[slot] = key << NOISE_BITS | (value + (1 << NOISE_BITS - 1))
        return value
    return (noise.cache[slot] & (1 << NOISE_BITS) - 1) - (1 << NOISE_BITS - 1)


@inlined
def find_ngram(text: TextIndex, rows: np.ndarray, row: Int) -> tuple[Int, Int]:
    """Find the longest n-gram in the text that ends the context whose hashes are `rows[row]`.

    Returns (place, length): the place in the text after the n-gram, and its number of tokens, up to MAX_GRAM; -1 and 0
    if there is none.
    """
    best, length = np.int64(-1), 0
    for i in range(1, NUM_HASHES):
        if rows[row, i] == 0:
            break
        slot = find_slot(text.keys, rows[row, i])
        if slot < 0:
            break
        place = text.places[slot, 0]
        if not is_held(text, place):
            break
        best, length = place, i
    return best, length


@inlined
def is_held(text: TextIndex, place: Int) -> bool:
    """Return whether the buffer still holds a place, and the tokens before it that a match may reach."""
    return bool(place > max(text.span[1] - len(text.buffer) + MAX_MATCH, np.int64(0)))


@compiled
def append_text(text: TextIndex, tokens: np.ndarray) -> None:
    """Append committed tokens, [n] int64, and index every n-gram that ends right before one of them."""
    last = len(text.buffer) - 1  # mask: the length is a power of two
    for i in range(len(tokens)):
        end = text.span[1]
        text.forks[end & last] = 0
        for length in range(1, NUM_HASHES):
            key = text.hashes[0, length]
            if key == 0:
                break
            slot = claim_slot(text.keys, text.places, 0, key)
            if length == MAX_GRAM and text.keys[slot] == key and is_held(text, text.places[slot, 0]):
                before = text.places[slot, 0]
                is_other = text.buffer[before & last] != tokens[i]
                text.forks[end & last] = before if is_other else text.forks[before & last]
            text.keys[slot] = key
            text.places[slot, 0] = end
        text.buffer[end & last] = tokens[i]
        text.span[1] = end + 1
        extend_hashes(text.hashes, 0, tokens[i], text.hashes, 0)


@inlined
def store_entry(table: TopKTable, key: Int, entries: np.ndarray, row: Int) -> None:
    """Store row `row` of `entries`, [n, ENTRY] int32, under a key, replacing its earlier entry."""
    slot = claim_slot(table.keys, table.entries, STAMP, key)
    table.keys[slot] = key
    for i in range(ORIGIN + 1):
        table.entries[slot, i] = entries[row, i]


@inlined
def position_key(text: TextIndex, position: Int, token: Int) -> Int:
    """Return the key of an absolute position in this request's text, after a token or, with -1, after any."""
    return extend_hash(extend_hash(np.int64(1 << 40), position), text.span[0] + (np.int64(token) << 32))


@inlined
def alternatives_key(text: TextIndex, position: Int) -> Int:
    """Return the key of the model's top-k candidates for an absolute position of this request's text."""
    return extend_hash(extend_hash(np.int64(1 << 41), position), text.span[0])


@inlined
def store_successor(table: TopKTable, key: Int, token: Int, stamp: Int) -> None:
    """Move a token to the front of an entry that keeps distinct tokens by recency."""
    slot = claim_slot(table.keys, table.entries, STAMP, key)
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
