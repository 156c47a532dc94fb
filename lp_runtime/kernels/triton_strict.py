"""Triton attention for exactness=strict: a token's result depends only on its path, bit for bit.

Keys are attended to in blocks of P absolute positions, as in model/attention/strict.py. A token's position alone
determines its blocks, the kernel that handles each block, and the order of all sums. So neither the other tokens of a
pass, nor their number, nor a token's index in the pass changes a bit of its result.

    head   blocks 0 .. p // P - 2: committed for every token that sees them, read once for a tile of tokens. Part i
           attends to the blocks i, i + NUM_PARTS, i + 2 NUM_PARTS ... in this order
    tail   the last two blocks up to position p: keys gathered for each token, along its path; then the parts of the
           head are added, in order

Keys that a token does not see add exact zeros. The number of parts is a constant, so that GPUs with different numbers
of multiprocessors add in the same order.

Letters: B tokens of a pass, padding included; H key/value heads, g query heads for each, D head size; P positions of a
block; p a token's position; L committed tokens of its sequence. This module needs Triton (tests run it in Triton's
interpreter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lp_runtime.kernels.triton_attention import (
    MIN_BLOCK,
    NO_LIMIT,
    add_block,
    blocks,
    find_tile,
    num_warps,
)
from lp_runtime.kernels.triton_cache import HEADER

NUM_PARTS = 16  # of the head: 128 tokens and 8 key/value heads with 4 query heads each are 1,024 programs
MANY_ROWS = 1 << 10  # assumed rows of every pass: a program's block sizes must not depend on the actual number


@triton.jit(do_not_specialize=["num_tokens", "column"])
def _attend_head(
    query, lowest, positions, table, output, total,
    scale, num_tokens, token_stride, head_stride, column,
    WIDTH: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK_TABLE: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the head, if it has a block; one program per key/value head, part and tile."""
    head, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(0)
    own_row, own_tile = find_tile(table, tile, WIDTH, NUM_ROWS, BLOCK_TABLE, GROUPS, BLOCK_ROWS)
    if own_row < NUM_ROWS:
        row = table + own_row * WIDTH
        first, num_own = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
        capacity = tl.load(row + 3)
        index = own_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = index < num_own * GROUPS
        token, query_head = first + index // GROUPS, head * GROUPS + index % GROUPS
        low = tl.load(lowest + token, mask=is_row, other=NO_LIMIT).to(tl.int32)
        last = tl.load(positions + token, mask=is_row, other=0).to(tl.int32) // POSITIONS - 1  # the tail's first block
        begin, end = tl.min(low, 0) // POSITIONS, tl.max(last, 0)
        end = tl.where(capacity > 0, end, 0)
        block = begin + (part - begin % PARTS + PARTS) % PARTS
        if block < end:
            dims = tl.arange(0, BLOCK_SIZE)
            inside = dims < SIZE
            places = token[:, None].to(tl.int64) * token_stride + query_head[:, None] * head_stride + dims[None, :]
            q = tl.load(query + places, mask=is_row[:, None] & inside[None, :], other=0.0)
            pointer = tl.pointer_type(query.dtype.element_ty)
            cache_start = head.to(tl.int64) * capacity * SIZE
            keys = tl.multiple_of(tl.load(row + column).to(pointer), 16) + cache_start
            values = tl.multiple_of(tl.load(row + column + 1).to(pointer), 16) + cache_start
            largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
            sums = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
            SPLIT: tl.constexpr = POSITIONS // BLOCK_KEYS
            for i in range(0, tl.cdiv(end - block, PARTS) * SPLIT):
                slots = (block + i // SPLIT * PARTS) * POSITIONS + i % SPLIT * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
                cells = slots[:, None].to(tl.int64) * SIZE + dims[None, :]
                k = tl.load(keys + cells, mask=inside[None, :], other=0.0)
                v = tl.load(values + cells, mask=inside[None, :], other=0.0)
                seen = (slots[None, :] < (last * POSITIONS)[:, None]) & (slots[None, :] >= low[:, None])
                largest, weight_sum, sums = add_block(q, k, v, seen, scale, largest, weight_sum, sums)
            is_empty = weight_sum == 0.0
            weight_sum = tl.where(is_empty, 1.0, weight_sum)
            places = (part * num_tokens + token).to(tl.int64) * num_heads * GROUPS + query_head
            sums = sums / weight_sum[:, None]
            tl.store(output + places[:, None] * SIZE + dims[None, :], sums, mask=is_row[:, None] & inside[None, :])
            tl.store(total + places, tl.where(is_empty, float("-inf"), largest + tl.log(weight_sum)), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens", "column"])
def _attend_tail(
    query, lowest, positions, paths, owners, table, sinks, outputs, totals, merged,
    scale, num_tokens, token_stride, head_stride, column,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, POSITIONS: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Attend to the tail, and add the parts of the head; one program per token and key/value head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_queries = tl.num_programs(1) * GROUPS
    row = table + tl.load(owners + token) * WIDTH
    capacity = tl.load(row + 3)
    low, position = tl.load(lowest + token).to(tl.int32), tl.load(positions + token).to(tl.int32)
    path = paths + token * (POSITIONS + 1)
    num_committed = tl.load(path).to(tl.int32)
    last = position // POSITIONS - 1  # the tail's first block
    group, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_SIZE)
    is_row, inside = group < GROUPS, dims < SIZE
    there = is_row[:, None] & inside[None, :]
    query_head = head * GROUPS + group
    places = token * token_stride + query_head[:, None] * head_stride + dims[None, :]
    q = tl.load(query + places, mask=there, other=0.0)
    pointer = tl.pointer_type(query.dtype.element_ty)
    cache_start = head.to(tl.int64) * capacity * SIZE
    keys = tl.multiple_of(tl.load(row + column).to(pointer), 16) + cache_start
    values = tl.multiple_of(tl.load(row + column + 1).to(pointer), 16) + cache_start
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    num_blocks = tl.where(capacity > 0, 2 * POSITIONS // BLOCK_KEYS, 0)  # padding sees nothing
    for i in range(0, num_blocks):
        at = last * POSITIONS + i * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        is_key = (at >= low) & (at <= position)  # low is 0 or more, so that negative positions are excluded
        offset = at - num_committed  # in the token's path; negative for committed tokens
        slot = tl.load(path + 1 + offset, mask=is_key & (offset >= 0), other=0)
        slot = tl.where(offset >= 0, slot, at.to(tl.int64))
        cells = slot[:, None] * SIZE + dims[None, :]
        k = tl.load(keys + cells, mask=is_key[:, None] & inside[None, :], other=0.0)
        v = tl.load(values + cells, mask=is_key[:, None] & inside[None, :], other=0.0)
        largest, weight_sum, sums = add_block(q, k, v, is_key[None, :], scale, largest, weight_sum, sums)

    parts = tl.arange(0, PARTS)
    begin = low // POSITIONS
    num_head = tl.where(capacity > 0, last - begin, 0)  # blocks of the head that the token sees
    is_used = (parts - begin % PARTS + PARTS) % PARTS < num_head
    head_places = (parts[:, None] * num_tokens + token) * num_queries + query_head[None, :]
    total = tl.load(totals + head_places, mask=is_used[:, None] & is_row[None, :], other=float("-inf"))
    larger = tl.maximum(largest, tl.max(total, 0))
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    fading = tl.exp(largest - shift)
    weight_sum, sums = weight_sum * fading, sums * fading[:, None]
    for part in range(0, tl.where(num_head > 0, PARTS, 0)):
        is_own = (part - begin % PARTS + PARTS) % PARTS < num_head
        own_places = (part * num_tokens + token) * num_queries + query_head
        own_total = tl.load(totals + own_places, mask=is_row & is_own, other=float("-inf"))
        output = tl.load(outputs + own_places[:, None] * SIZE + dims[None, :], mask=there & is_own, other=0.0)
        weight = tl.exp(own_total - shift)
        weight_sum += weight
        sums += output * weight[:, None]
    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    result = sums / weight_sum[:, None]
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32)
        result = result * tl.sigmoid(larger + tl.log(weight_sum) - sink)[:, None]
    places = (token * num_queries + query_head[:, None]) * SIZE + dims[None, :]
    tl.store(merged + places, result, mask=there)


def attend_strictly(
    query: torch.Tensor,
    num_heads: int,
    lowest: torch.Tensor,
    positions: torch.Tensor,
    paths: torch.Tensor,
    owners: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention to committed tokens and ancestors, [1, B, g H, D]; 0 for padding.

    Args as for `triton_attention.attend`, and:
        positions: [B] int64, absolute; at most P - 1 after the sequence's committed tokens.
        paths: [B, 1 + P] int64: L of the token's sequence, then the cache indices of the keys on the token's path, from
            position L up to the token's own.
        owners: [B] int64, each token's row in the table.
    """
    assert query.stride(3) == 1 and paths.is_contiguous() and table.is_contiguous()
    assert sinks is None or sinks.is_contiguous()
    _, num_queries, num_tokens, size = query.shape
    groups, num_rows = num_queries // num_heads, len(table)
    block = blocks(MANY_ROWS, size, query.element_size())
    num_tiles = triton.cdiv(groups * num_tokens, block["BLOCK_ROWS"])
    constants = {"GROUPS": groups, "SIZE": size, "PARTS": NUM_PARTS, "POSITIONS": paths.shape[1] - 1}
    result = torch.empty((1, num_tokens, num_queries, size), dtype=query.dtype, device=query.device)
    shape = (NUM_PARTS, num_tokens, num_queries)
    output = torch.empty((*shape, size), dtype=torch.float32, device=query.device)
    total = torch.empty(shape, dtype=torch.float32, device=query.device)
    strides, column = (query.stride(2), query.stride(1)), HEADER + 2 * layer
    _attend_head[(num_heads, NUM_PARTS, num_tiles + min(num_rows, num_tokens) - 1)](
        query, lowest, positions, table, output, total, scale, num_tokens, *strides, column,
        WIDTH=table.shape[1], NUM_ROWS=num_rows, BLOCK_TABLE=triton.next_power_of_2(num_rows),
        num_stages=2, num_warps=num_warps(query.element_size()), **constants, **block,
    )  # fmt: skip
    _attend_tail[(num_tokens, num_heads)](
        query, lowest, positions, paths, owners, table, query if sinks is None else sinks, output, total, result,
        scale, num_tokens, *strides, column,
        WIDTH=table.shape[1], HAS_SINKS=sinks is not None, num_stages=2, **constants,
        num_warps=num_warps(query.element_size()),
        **block | {"BLOCK_ROWS": max(MIN_BLOCK, triton.next_power_of_2(groups))},
    )  # fmt: skip
    return result
