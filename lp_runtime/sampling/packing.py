"""Packing of top-k candidates into int64 on a CPU, in the layout of sampler.py.

Letters: n nodes, V vocabulary, K = `num` top-k candidates. Scores are [n, V] float32, packed results [n, width] int64.
A row's candidates are [K + 1] ids, int64, and scores, float32, the likeliest first; NO_TOKEN and -inf for none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from lp_runtime.kernels.types import NO_TOKEN
from lp_runtime.lookahead.top_k import ENTRY, MARGIN_BITS, MARGINS, MAX_MARGIN, UNITS_PER_NAT, K
from lp_runtime.utils.jit import bound, compiled, compiles, inlined

HALF_BITS = 32  # half of a packed integer: a candidate with its margin, or a successor
HALF_MASK = (1 << HALF_BITS) - 1
BLOCK = 64  # scores compared in one vectorized loop


@compiles
def compile_sampler() -> None:
    packed = np.zeros((1, 2), np.int64)
    pack_kernel()(np.zeros((1, 3), np.float32), 2, packed)
    unpack_kernel()(packed, 2, np.empty((1, ENTRY), np.int32))


@functools.cache
def pack_kernel() -> Callable[[np.ndarray, int, np.ndarray], None]:
    return bound(pack_top_k, np.zeros((1, 1), np.float32), 0, np.zeros((1, 1), np.int64))


@functools.cache
def unpack_kernel() -> Callable[[np.ndarray, int, np.ndarray], None]:
    return bound(unpack_top_k, np.zeros((1, 1), np.int64), 0, np.zeros((1, 1), np.int32))


@compiled(makes_arrays=True)
def pack_top_k(scores: np.ndarray, num: int, packed: np.ndarray) -> None:
    """Pack each row's likeliest tokens, with their margins, into all columns but the first, in one pass."""
    ids, values = np.empty(num + 1, dtype=np.int64), np.empty(num + 1, dtype=np.float32)
    for row in range(scores.shape[0]):
        _scan_row(scores[row], num, ids, values)
        pack_words(ids, values, num, packed, row)


@compiled(makes_arrays=True)
def find_top_k(scores: np.ndarray, num: int, ids: np.ndarray, values: np.ndarray) -> None:
    """Write rows' likeliest tokens to `ids`, [n, K] int64, and their scores to `values`, [n, K] float32."""
    row_ids, row_values = np.empty(num + 1, dtype=np.int64), np.empty(num + 1, dtype=np.float32)
    for row in range(scores.shape[0]):
        _scan_row(scores[row], num, row_ids, row_values)
        for rank in range(num):
            ids[row, rank], values[row, rank] = row_ids[rank], row_values[rank]


@compiled(makes_arrays=True)
def pack_candidates(ids: np.ndarray, values: np.ndarray, num: int, packed: np.ndarray) -> None:
    """Pack the likeliest of the tokens found in all slices of the vocabulary, like `pack_top_k`.

    `ids` are [n, m] int64, of equal scores the lower id first; `values` are [n, m] float32 scores, -inf for none.
    """
    best_ids, best_values = np.empty(num + 1, dtype=np.int64), np.empty(num + 1, dtype=np.float32)
    for row in range(ids.shape[0]):
        best_ids[:] = NO_TOKEN
        best_values[:] = -np.inf
        for place in range(ids.shape[1]):
            if values[row, place] > best_values[num - 1]:
                insert_candidate(best_ids, best_values, num, ids[row, place], values[row, place])
        pack_words(best_ids, best_values, num, packed, row)


@inlined(makes_arrays=True)
def _scan_row(line: np.ndarray, num: int, ids: np.ndarray, values: np.ndarray) -> None:
    ids[:] = NO_TOKEN
    values[:] = -np.inf
    smallest = values[num - 1]
    for start in range(0, line.size, BLOCK):
        block = line[start : start + BLOCK]
        if block.size == BLOCK:
            num_larger = np.int32(0)
            for place in range(BLOCK):  # compiled to vector instructions; most blocks need no more than this
                num_larger += np.int32(block[place] > smallest)
            if num_larger == 0:
                continue
        for token in range(start, start + block.size):
            if line[token] > smallest:
                insert_candidate(ids, values, num, token, line[token])
                smallest = values[num - 1]


@inlined
def insert_candidate(ids: np.ndarray, values: np.ndarray, num: int, token: int, score: float) -> None:
    """Insert a token among a row's candidates, and drop the last one, whose score must be smaller."""
    rank = num - 1
    while rank > 0 and values[rank - 1] < score:
        values[rank], ids[rank] = values[rank - 1], ids[rank - 1]
        rank -= 1
    values[rank], ids[rank] = score, token


@inlined
def pack_words(ids: np.ndarray, values: np.ndarray, num: int, packed: np.ndarray, row: int) -> None:
    """Write a row's candidates and their margins to `packed`, two per integer, from column 1 on."""
    for rank in range(0, num, 2):
        word = np.int64(0)
        for half in range(2):
            token, margin = np.int64(NO_TOKEN), np.int64(MAX_MARGIN)
            if rank + half < num and values[rank + half] > -np.inf:
                token = ids[rank + half]
                margin = np.int64(0)
                if values[rank + half] < values[0]:  # and not both infinite
                    margin = np.int64(min(np.rint((values[0] - values[rank + half]) * UNITS_PER_NAT), MAX_MARGIN))
            word |= ((token << MARGIN_BITS) | margin) << (HALF_BITS * half)
        packed[row, 1 + rank // 2] = word


@compiled
def unpack_top_k(packed: np.ndarray, num: int, entries: np.ndarray) -> None:
    """Unpack candidates, and their margins if `num` is K, into [n, ENTRY] int32 entries.

    K and the layout are those of lookahead/top_k.py. Missing values become -1.
    """
    for row in range(len(packed)):
        for place in range(ENTRY):
            entries[row, place] = -1
        for rank in range(num):
            word = (packed[row, 1 + (rank >> 1)] >> (HALF_BITS * (rank & 1))) & HALF_MASK
            token = word >> MARGIN_BITS
            entries[row, rank] = -1 if token == NO_TOKEN else token
        if num == K:
            for place in range(K // 4):
                margins = np.int64(0)
                for rank in range(4 * place, 4 * place + 4):
                    word = packed[row, 1 + (rank >> 1)] >> (HALF_BITS * (rank & 1))
                    margins |= (word & MAX_MARGIN) << (8 * (rank & 3))
                entries[row, MARGINS + place] = np.int32(margins)
