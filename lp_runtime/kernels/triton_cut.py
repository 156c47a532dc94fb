"""Triton kernel that finds which tokens top_k and top_p keep, without sorting.

It keeps the same tokens as transformers' TopKLogitsWarper and TopPLogitsWarper: of ties at the boundary those with the
largest ids, as after a stable sort. The smallest kept score is found by bisection over the bits of scores.
Probabilities are summed as integers, so that the order of summation does not matter.

Letters: n nodes, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

CUT_BLOCK = 2048  # tokens that a program reads at once
CUT_WARPS = 8
MASS_BITS = 61  # of the fixed-point sum of a row's probabilities, which must fit int64
MARGIN_NATS = 0.1  # safety margin for the rounding of exponentials
MIN_CUT_MASS = 1e-4  # smallest 1 - top_p: below this it is near the rounding error of the probabilities
NO_CUT_MASS = 1.0  # placeholder without top_p; never read
KEY_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits of float32 that are 0 in this dtype
LEAST_KEY = tl.constexpr(-2139095041)  # `_key` of -inf


class Cut(NamedTuple):
    """Tokens of each row that may be sampled: those above a threshold, and the last ones at it."""

    thresholds: torch.Tensor  # [n] float32: scaled scores if the logits are float32, else unscaled logits
    first_ids: torch.Tensor  # [n] int32; of the tokens at the threshold, those from this id on may be sampled


@triton.jit
def _key(score):
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _cut_scores(logits, start, tokens, inside, inverse_temperature, SHIFT: tl.constexpr):
    """Return (scores that order the tokens, scaled scores), float32; -inf outside.

    float32 logits are ordered by their scaled scores, half-precision ones by the logits themselves: scaling in float32
    keeps different ones different.
    """
    raw = tl.load(logits + start + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    raw = tl.where(raw == 0.0, 0.0, raw)  # turns -0.0 into 0.0, whose keys differ
    scaled = raw * inverse_temperature
    return (scaled if SHIFT == 0 else raw), scaled


@triton.jit(do_not_specialize=["top_k"])  # else 1, multiples of 16 and other numbers are compiled apart
def _find_cut(
    logits, thresholds, first_ids, inverse_temperature, cut_mass, reach, mass_unit, top_k, size, stride,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the smallest score of a row that may be sampled; one program per row."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride
    places = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        score, _ = _cut_scores(logits, start, first + places, first + places < size, inverse_temperature, SHIFT)
        tops = tl.maximum(tops, score)
    top = tl.max(tops, 0)
    top_scaled = top if SHIFT == 0 else top * inverse_temperature
    top_key = (_key(top) >> SHIFT).to(tl.int64)
    least_key = tl.full([], LEAST_KEY >> SHIFT, tl.int64)
    if HAS_TOP_K:  # bisect for the largest score that at least k tokens reach
        low, high = least_key, top_key
        while low < high:
            middle = (low + high + 1) >> 1
            counts = tl.zeros([BLOCK], tl.int32)
            for first in range(0, size, BLOCK):
                inside = first + places < size
                score, _ = _cut_scores(logits, start, first + places, inside, inverse_temperature, SHIFT)
                counts += (inside & ((_key(score) >> SHIFT) >= middle)).to(tl.int32)
            enough = tl.sum(counts, 0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        least_key = low
    low = least_key
    num_removed = tl.zeros([], tl.int64)
    if HAS_TOP_P:  # bisect for the smallest score such that the tokens up to it have more than the mass to cut
        mass = tl.zeros([BLOCK], tl.int64)
        for first in range(0, size, BLOCK):
            inside = first + places < size
            score, scaled = _cut_scores(logits, start, first + places, inside, inverse_temperature, SHIFT)
            each = (tl.exp(scaled - top_scaled) * mass_unit).to(tl.int64)
            mass += tl.where(inside & ((_key(score) >> SHIFT) >= least_key), each, 0)
        whole = tl.sum(mass, 0)
        removed = tl.minimum((whole.to(tl.float64) * cut_mass).to(tl.int64), whole - 1)
        low = tl.maximum(low, (_key(top - reach) >> SHIFT).to(tl.int64))
        high = top_key
        while low < high:
            middle = (low + high) >> 1
            mass = tl.zeros([BLOCK], tl.int64)
            for first in range(0, size, BLOCK):
                inside = first + places < size
                score, scaled = _cut_scores(logits, start, first + places, inside, inverse_temperature, SHIFT)
                key = _key(score) >> SHIFT
                each = (tl.exp(scaled - top_scaled) * mass_unit).to(tl.int64)
                mass += tl.where(inside & (key >= least_key) & (key <= middle), each, 0)
            enough = tl.sum(mass, 0) > removed
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        below = tl.zeros([BLOCK], tl.int64)
        each_tie = tl.zeros([BLOCK], tl.int64)
        for first in range(0, size, BLOCK):
            inside = first + places < size
            score, scaled = _cut_scores(logits, start, first + places, inside, inverse_temperature, SHIFT)
            key = _key(score) >> SHIFT
            each = (tl.exp(scaled - top_scaled) * mass_unit).to(tl.int64)
            below += tl.where(inside & (key >= least_key) & (key < low), each, 0)
            each_tie = tl.maximum(each_tie, tl.where(inside & (key == low), each, 0))
        num_removed = (removed - tl.sum(below, 0)) // tl.maximum(tl.max(each_tie, 0), 1)
    values = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.zeros([BLOCK], tl.int32)
    num_seen = tl.zeros([], tl.int32)
    for first in range(0, size, BLOCK):
        inside = first + places < size
        score, _ = _cut_scores(logits, start, first + places, inside, inverse_temperature, SHIFT)
        is_tie = inside & ((_key(score) >> SHIFT) == low)
        values = tl.maximum(values, tl.where(is_tie, score, float("-inf")))
        rank = num_seen + tl.cumsum(is_tie.to(tl.int32), 0)
        ids += tl.where(is_tie & (rank == num_removed + 1), first + places, 0)
        num_seen += tl.sum(is_tie.to(tl.int32), 0)
    tl.store(thresholds + row, tl.max(values, 0))
    tl.store(first_ids + row, tl.sum(ids, 0))


def can_cut(dtype: torch.dtype, top_p: float | None) -> bool:
    """Whether `find_cut` supports a dtype and top_p, and keeps exactly the tokens that transformers keeps."""
    return dtype in KEY_SHIFTS and (top_p is None or 1 - top_p >= MIN_CUT_MASS)


def find_cut(logits: torch.Tensor, inverse_temperature: float, top_k: int | None, top_p: float | None) -> Cut:
    """Return the tokens of scaled logits that TopKLogitsWarper followed by TopPLogitsWarper would keep.

    `logits` are [n, V] float32, bfloat16 or float16, the last dimension contiguous. `top_p` is at most 1 -
    MIN_CUT_MASS.
    """
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and can_cut(logits.dtype, top_p)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    first_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    cut_mass = NO_CUT_MASS if top_p is None else 1 - top_p
    reach = MARGIN_NATS + math.log(size / cut_mass)  # all tokens this far below the top one weigh less than the cut
    if KEY_SHIFTS[logits.dtype]:
        reach /= inverse_temperature
    mass_unit = 2.0 ** (MASS_BITS - math.ceil(math.log2(max(2, size))))
    _find_cut[(num_rows,)](
        logits, thresholds, first_ids, inverse_temperature, cut_mass, reach, mass_unit, top_k or 0,
        size, logits.stride(0),
        HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None, SHIFT=KEY_SHIFTS[logits.dtype], BLOCK=CUT_BLOCK,
        num_warps=CUT_WARPS, enable_fp_fusion=False,  # every pass over a row must compute the same numbers
    )  # fmt: skip
    return Cut(thresholds, first_ids)


def cut_scores(logits: torch.Tensor, inverse_temperature: float, cut: Cut) -> torch.Tensor:
    """Return the scaled scores of logits, [n, V] float32, with -inf for the tokens that a cut removes."""
    scaled = logits.float() * inverse_temperature
    score = scaled if KEY_SHIFTS[logits.dtype] == 0 else logits.float()
    threshold, ids = cut.thresholds[:, None], torch.arange(logits.shape[1], device=logits.device)
    is_removed = (score < threshold) | ((score == threshold) & (ids < cut.first_ids[:, None]))
    return scaled.masked_fill(is_removed, -torch.inf)
