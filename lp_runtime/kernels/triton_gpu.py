"""Triton kernels between matrix products, for the tokens of a tree.

Those of triton_cache.py rotate queries and keys and write the caches, those of triton_attention.py attend; those of
this module gate the MLP and find the likeliest tokens. This module needs Triton (tests run it in Triton's interpreter).

Letters: F the MLP's inner size; n nodes, V vocabulary, K top-k candidates of a node.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lp_runtime.kernels.triton_attention import attend as attend
from lp_runtime.kernels.triton_cache import rotate_and_write as rotate_and_write
from lp_runtime.kernels.triton_cache import write as write

GATE_BLOCK = 1024  # elements of a program
CHUNK = 2048  # tokens of the vocabulary that a program looks at


@triton.jit
def _gate(gate_up, output, size, BLOCK: tl.constexpr):
    """Gate one block of the inner size of one token; a program for each token and each block."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    gate = tl.load(gate_up + token * 2 * size + places, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + places, mask=inside).to(tl.float32)
    tl.store(output + token * size + places, gate * tl.sigmoid(gate) * up, mask=inside)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the SiLU of the first half of `gate_up` times the second: [..., F] of [..., 2 F], contiguous."""
    size = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    _gate[(output.numel() // size, triton.cdiv(size, GATE_BLOCK))](gate_up, output, size, BLOCK=GATE_BLOCK)
    return output


@triton.jit
def _top_of_chunks(scores, values, ids, size, stride, NUM: tl.constexpr, NO_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Find the NUM largest scores of a chunk, of equals the lowest id first; a program for each row and each chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(scores + row * stride + tokens, mask=tokens < size, other=float("-inf"))
    places = (row * tl.num_programs(1) + chunk) * NUM
    for rank in tl.static_range(NUM):
        best = tl.max(left, 0)
        token = tl.min(tl.where(left == best, tokens, NO_TOKEN), 0)
        tl.store(values + places + rank, best)
        tl.store(ids + places + rank, token)
        left = tl.where(tokens == token, float("-inf"), left)


@triton.jit
def _pack_top(
    values, ids, first, packed, num_found,
    NUM: tl.constexpr, WIDTH: tl.constexpr, NO_TOKEN: tl.constexpr, MARGIN_UNIT: tl.constexpr, MAX_MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the NUM largest of all chunks' scores, with their margins; a program for each row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    is_found = places < num_found
    left = tl.load(values + row * num_found + places, mask=is_found, other=float("-inf"))
    tokens = tl.load(ids + row * num_found + places, mask=is_found, other=NO_TOKEN)
    tl.store(packed + row * WIDTH, tl.load(first + row))
    top = tl.max(left, 0)
    for pair in tl.static_range(WIDTH - 1):
        word = tl.zeros([], tl.int64)
        for half in tl.static_range(2):
            token, margin = tl.full([], NO_TOKEN, tl.int64), tl.full([], MAX_MARGIN, tl.int64)
            if 2 * pair + half < NUM:
                best = tl.max(left, 0)
                place = tl.min(tl.where(left == best, places, BLOCK), 0)
                is_there = best > float("-inf")
                token = tl.where(is_there, tl.min(tl.where(places == place, tokens, NO_TOKEN), 0).to(tl.int64), token)
                below = tl.minimum(tl.floor((top - best) * MARGIN_UNIT + 0.5), MAX_MARGIN)
                below = tl.where(best == top, 0.0, below)  # both may be infinite
                margin = tl.where(is_there, below, MAX_MARGIN).to(tl.int64)
                left = tl.where(places == place, float("-inf"), left)
            word |= ((token << 8) | margin) << (32 * half)
        tl.store(packed + row * WIDTH + 1 + pair, word)


def pack_top_k(
    scores: torch.Tensor, first: torch.Tensor, num: int, no_token: int, margin_unit: int, max_margin: int
) -> torch.Tensor:
    """Find the likeliest tokens of each row, and pack them and their margins behind a first integer.

    The layout is that of lp_runtime/sampling/sampler.py.

    Args:
        scores: [n, V] float32; the last dimension contiguous. A token whose score is -inf is not among the likeliest.
        first: [n] int64, the first integer of each row.
        num: K.
        no_token: packed where there are fewer than K tokens.
        margin_unit: units of a margin in a nat.
        max_margin: the largest margin.

    Returns:
        [n, 1 + K / 2, rounded up] int64.
    """
    num_rows, size = scores.shape
    num_chunks = triton.cdiv(size, CHUNK)
    found = (num_rows, num_chunks * num)
    values = torch.empty(found, dtype=torch.float32, device=scores.device)
    ids = torch.empty(found, dtype=torch.int32, device=scores.device)
    packed = torch.empty((num_rows, 1 + triton.cdiv(num, 2)), dtype=torch.int64, device=scores.device)
    _top_of_chunks[(num_rows, num_chunks)](
        scores, values, ids, size, scores.stride(0), NUM=num, NO_TOKEN=no_token, BLOCK=CHUNK
    )
    _pack_top[(num_rows,)](
        values, ids, first, packed, found[1],
        NUM=num, WIDTH=packed.shape[1], NO_TOKEN=no_token, MARGIN_UNIT=margin_unit, MAX_MARGIN=max_margin,
        BLOCK=triton.next_power_of_2(found[1]),
    )  # fmt: skip
    return packed
