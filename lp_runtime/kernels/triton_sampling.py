"""Triton kernels that sample from logits: Gumbel noise, the argmax and the top-k candidates.

Logits are read in place, in the dtype of the model's head; no tensor of the vocabulary's size is written. The noise
equals that of lp_runtime/sampling/gumbel.py bit for bit: Philox4x32-10 and two logarithms in float64.

Letters: n nodes, V vocabulary, K top-k candidates of a node, C chunks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lp_runtime.kernels import types
from lp_runtime.kernels.triton_cut import KEY_SHIFTS, Cut
from lp_runtime.kernels.types import Noise, Packing
from lp_runtime.lookahead import philox, top_k

CHUNK = 2048  # tokens of the vocabulary that a program scans
Chunks = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # see `_scan`

MULTIPLIER_A, MULTIPLIER_B = map(tl.constexpr, philox.MULTIPLIERS)
INCREMENT_A, INCREMENT_B = map(tl.constexpr, philox.KEY_INCREMENTS)
NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)
HALF_BITS = tl.constexpr(philox.UNIFORM_HALF_BITS)
UNUSED_BITS = tl.constexpr(philox.WORD_BITS - philox.UNIFORM_HALF_BITS)
UNIFORM_UNIT = tl.constexpr(philox.UNIFORM_UNIT)
NO_TOKEN = tl.constexpr(types.NO_TOKEN)
UNITS_PER_NAT, MAX_MARGIN = tl.constexpr(top_k.UNITS_PER_NAT), tl.constexpr(top_k.MAX_MARGIN)


@triton.jit
def _gumbel(pairs, position, sample, key_low, key_high):
    """Return the Gumbel noise, float32, of token ids 2 i and of token ids 2 i + 1 for each i in pairs."""
    first, second = pairs.to(tl.uint32), tl.zeros_like(pairs).to(tl.uint32) + position
    third, fourth = tl.zeros_like(first) + sample, tl.zeros_like(first)
    for _ in tl.static_range(NUM_ROUNDS):
        high_a, low_a = tl.umulhi(first, MULTIPLIER_A), first * MULTIPLIER_A
        high_b, low_b = tl.umulhi(third, MULTIPLIER_B), third * MULTIPLIER_B
        first, second, third, fourth = high_b ^ second ^ key_low, low_b, high_a ^ fourth ^ key_high, low_a
        key_low += INCREMENT_A
        key_high += INCREMENT_B
    return _gumbel_of(first, second), _gumbel_of(third, fourth)


@triton.jit
def _gumbel_of(upper, lower):
    bits = ((upper >> UNUSED_BITS).to(tl.int64) << HALF_BITS) | (lower >> UNUSED_BITS).to(tl.int64)
    uniform = (bits.to(tl.float64) + 0.5) * UNIFORM_UNIT
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["key_low", "key_high", "sample", "first"])
def _scan_chunks(
    logits, thresholds, first_ids, positions, values, ids, best_values, best_ids,
    inverse_temperature, key_low, key_high, sample, first, size, stride,
    NUM: tl.constexpr, DRAWS: tl.constexpr, HAS_CUT: tl.constexpr, SHIFT: tl.constexpr,
    IS_ODD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find a chunk's NUM largest scores and its largest sum of score and noise; ties go to the lowest id.

    One program per row and chunk. Compiled without fused multiply-add: a score is rounded before its noise is added.
    Chunks start at id `first`, or if that IS_ODD at the id before it, because noise comes in pairs.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    places = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    if IS_ODD:
        places -= 1
        inside = (places >= 0) & (places < size)
    tokens = first + places
    raw = tl.load(logits + row.to(tl.int64) * stride + places, mask=inside, other=float("-inf")).to(tl.float32)
    left = raw * inverse_temperature
    if HAS_CUT:
        score = left if SHIFT == 0 else raw
        threshold, first_id = tl.load(thresholds + row), tl.load(first_ids + row)
        left = tl.where((score > threshold) | ((score == threshold) & (tokens >= first_id)), left, float("-inf"))
    best_place = row.to(tl.int64) * num_chunks + chunk
    if DRAWS:  # add noise, instead of choosing the largest score
        if tl.max(left, 0) > float("-inf"):
            pairs = first // 2 + chunk * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            position = tl.load(positions + row).to(tl.uint32)
            even, odd = _gumbel(pairs, position, sample.to(tl.uint32), key_low.to(tl.uint32), key_high.to(tl.uint32))
            noisy = left + tl.interleave(even, odd)
            best = tl.max(noisy, 0)
            tl.store(best_values + best_place, best)
            tl.store(best_ids + best_place, tl.min(tl.where(noisy == best, tokens, NO_TOKEN), 0))
        else:  # no token of the chunk may be sampled
            tl.store(best_values + best_place, float("-inf"))
            tl.store(best_ids + best_place, first + chunk * BLOCK)
    elif NUM == 0:
        best = tl.max(left, 0)
        tl.store(best_values + best_place, best)
        tl.store(best_ids + best_place, tl.min(tl.where(left == best, tokens, NO_TOKEN), 0))
    first_place = best_place * NUM
    for rank in tl.static_range(NUM):
        best = tl.max(left, 0)
        token = tl.min(tl.where(left == best, tokens, NO_TOKEN), 0)
        tl.store(values + first_place + rank, best)
        tl.store(ids + first_place + rank, token)
        left = tl.where(tokens == token, float("-inf"), left)


@triton.jit
def _pack_rows(
    values, ids, best_values, best_ids, packed, num_chunks, size,
    NUM: tl.constexpr, WIDTH: tl.constexpr, HAS_BEST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Pack the successor and the NUM largest scores of all chunks with margins; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_BEST:
        chunks = tl.arange(0, BLOCK_CHUNKS)
        best_places = row * num_chunks + chunks
        bests = tl.load(best_values + best_places, mask=chunks < num_chunks, other=float("-inf"))
        chunk = tl.min(tl.where(bests == tl.max(bests, 0), chunks, BLOCK_CHUNKS), 0)
        successor = tl.load(best_ids + row * num_chunks + tl.minimum(chunk, num_chunks - 1))
    if NUM > 0:
        num_scanned = num_chunks * NUM
        places = tl.arange(0, BLOCK)
        is_scanned = places < num_scanned
        left = tl.load(values + row * num_scanned + places, mask=is_scanned, other=float("-inf"))
        tokens = tl.load(ids + row * num_scanned + places, mask=is_scanned, other=NO_TOKEN)
        top = tl.max(left, 0)
        if not HAS_BEST:
            top_place = tl.min(tl.where(left == top, places, BLOCK), 0)
            successor = tl.min(tl.where(places == top_place, tokens, NO_TOKEN), 0)
    successor = tl.where(successor < size, successor, 0)  # no token was found if all scores are NaN
    tl.store(packed + row * WIDTH, successor.to(tl.int64))
    for pair in tl.static_range(WIDTH - 1):
        word = tl.zeros([], tl.int64)
        if NUM > 0:
            for half in tl.static_range(2):
                token, margin = tl.full([], NO_TOKEN, tl.int64), tl.full([], MAX_MARGIN, tl.int64)
                if 2 * pair + half < NUM:
                    best = tl.max(left, 0)
                    place = tl.min(tl.where(left == best, places, BLOCK), 0)
                    is_there = best > float("-inf")
                    chosen = tl.min(tl.where(places == place, tokens, NO_TOKEN), 0).to(tl.int64)
                    token = tl.where(is_there, chosen, token)
                    below = tl.minimum(tl.floor((top - best) * UNITS_PER_NAT + 0.5), MAX_MARGIN)
                    below = tl.where(best == top, 0.0, below)  # both may be infinite, and their difference NaN
                    margin = tl.where(is_there, below, MAX_MARGIN).to(tl.int64)
                    left = tl.where(places == place, float("-inf"), left)
                word |= ((token << 8) | margin) << (32 * half)
        tl.store(packed + row * WIDTH + 1 + pair, word)


def sample_and_pack(
    logits: torch.Tensor,  # [n, V] float32, bfloat16 or float16; the last dimension contiguous
    packing: Packing,
    # Added to the scaled logits before the successor is chosen; None to choose the largest logit.
    noise: Noise | None = None,
    inverse_temperature: float = 1.0,  # factor of the logits, in float32
    cut: Cut | None = None,
) -> torch.Tensor:
    """Sample each row's successor; pack it with the top-k candidates scored above -inf: [n, width] int64."""
    num_chunks = triton.cdiv(logits.shape[1], CHUNK)
    candidates = _scan(logits, packing, noise, inverse_temperature, cut, num_chunks)
    return _pack(candidates, packing, noise, logits.shape[1])


def find_in_slice(
    logits: torch.Tensor,
    packing: Packing,
    noise: Noise | None,
    inverse_temperature: float,
    first: int,
    num_tokens: int,
) -> torch.Tensor:
    """Scan a slice of the vocabulary, [n, v] from id `first` on; `pack_candidates` combines all slices.

    Returns [n, C (1 + max(K, 1))] int64 for C chunks: each integer holds a score (upper half) and a token id (lower
    half). `num_tokens` is the size of the largest slice, so that all slices have the same number of chunks.
    """
    num_chunks = triton.cdiv(num_tokens + 1, CHUNK)
    values, ids, best_values, best_ids = _scan(logits, packing, noise, inverse_temperature, None, num_chunks, first)
    values, ids = torch.cat([values, best_values], 1), torch.cat([ids, best_ids], 1)
    return (values.view(torch.int32).long() << 32) | ids.long()


def pack_candidates(
    candidates: torch.Tensor, packing: Packing, noise: Noise | None, vocabulary_size: int
) -> torch.Tensor:
    """Combine P results of `find_in_slice`, [P, n, width], ordered by token id, as `sample_and_pack` does."""
    num_slices, num_rows, width = candidates.shape
    num = max(1, packing.num)
    num_chunks = width // (1 + num)
    values, ids = (candidates >> 32).int().view(torch.float32), (candidates & 0xFFFFFFFF).int()
    parts = []
    for each in (values, ids):
        each = each.transpose(0, 1)  # [n, P, width]
        parts.append((each[..., : num_chunks * num].reshape(num_rows, -1), each[..., num_chunks * num :]))
    (values, best_values), (ids, best_ids) = parts
    best_values, best_ids = (each.reshape(num_rows, -1).contiguous() for each in (best_values, best_ids))
    chunks = values.contiguous(), ids.contiguous(), best_values, best_ids
    return _pack(chunks, packing, noise, vocabulary_size)


def _scan(
    logits: torch.Tensor,
    packing: Packing,
    noise: Noise | None,
    inverse_temperature: float,
    cut: Cut | None,
    num_chunks: int,
    first: int = 0,
) -> Chunks:
    """Find the likeliest tokens of each of C chunks, and the token to be sampled from it.

    Returns (values, ids), [n, C max(K, 1)] float32 and int32, and (best_values, best_ids), [n, C] of the same dtypes.
    The last two are not written if there are candidates but no noise.
    """
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and packing.width >= 1 + triton.cdiv(packing.num, 2)
    device = logits.device
    values = torch.empty((num_rows, num_chunks * max(1, packing.num)), dtype=torch.float32, device=device)
    ids = torch.empty(values.shape, dtype=torch.int32, device=device)
    best_values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    best_ids = torch.empty(best_values.shape, dtype=torch.int32, device=device)
    if not num_rows:
        return values, ids, best_values, best_ids
    positions = best_ids if noise is None else noise.positions  # a placeholder without noise: not read
    thresholds, first_ids = (best_values, best_ids) if cut is None else cut  # placeholders without a cut
    seed, sample = (0, 0) if noise is None else (noise.seed, noise.sample)
    _scan_chunks[(num_rows, num_chunks)](
        logits, thresholds, first_ids, positions, values, ids, best_values, best_ids,
        inverse_temperature, _word(seed), _word(seed >> 32), _word(sample), first, size, logits.stride(0),
        NUM=packing.num, DRAWS=noise is not None, HAS_CUT=cut is not None,
        SHIFT=KEY_SHIFTS[logits.dtype], IS_ODD=first % 2 == 1, BLOCK=CHUNK, enable_fp_fusion=False,
    )  # fmt: skip
    return values, ids, best_values, best_ids


def _pack(chunks: Chunks, packing: Packing, noise: Noise | None, size: int) -> torch.Tensor:
    num, (num_rows, num_chunks) = packing.num, chunks[-1].shape
    packed = torch.empty((num_rows, packing.width), dtype=torch.int64, device=chunks[-1].device)
    if not num_rows:
        return packed
    _pack_rows[(num_rows,)](
        *chunks, packed, num_chunks, size,
        NUM=num, WIDTH=packing.width, HAS_BEST=noise is not None or num == 0,
        BLOCK=triton.next_power_of_2(num_chunks * max(1, num)), BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
    )  # fmt: skip
    return packed


def _word(value: int) -> int:
    """Return the lower 32 bits of an integer as int32, so that Triton sees one type for all seeds."""
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
