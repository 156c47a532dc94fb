"""Triton attention over KV caches in fixed-size passes; triton_cache.py writes the caches.

Everything that changes from step to step is read on the device: the number of sequences, which tokens belong to which,
how many tokens of each are committed, the address of each cache, and what each token may see. So one captured CUDA
graph serves any slot of any capacity, and several sequences at once.

A row of the *table* describes a sequence, [4 + 2 layers] int64:

    first token | tokens fed | L | capacity of the cache | address of the keys, address of the values, layer by layer

The table's last row is for the padding after all sequences. It has no cache: its capacity is 0.

This module needs Triton (tests run it in Triton's interpreter).

Letters: B tokens of a pass, padding included; T tokens of one sequence, L its committed tokens; H key/value heads, g
query heads for each, D head size; P rows of the table; S parts into which a sequence's keys are split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lp_runtime.kernels.early_launch import early_launch
from lp_runtime.kernels.triton_cache import HEADER

MIN_BLOCK = 16  # smallest number of rows and columns of a tensor-core product
MAX_ROWS = 64  # of a program, in half precision: the widest products of sm_90 need at least this many
MAX_LARGE_ROWS = 32  # of a program, in half precision, if a head is larger than MAX_SIZE: with more, registers spill
MAX_SIZE = 128  # head size up to which MAX_ROWS applies
MAX_FLOAT_ROWS = 16  # of a program, in float32
MAX_KEYS = 32  # of a block, as bits of a mask's word; with 64, a multiprocessor has registers for fewer programs
KEY_BYTES = 1 << 14  # of the keys of a block; fits the shared memory of the smallest GPUs
STAGED_BYTES = 1 << 13  # of the keys of a block, up to which two blocks are loaded ahead; one if they are larger
MAX_PARTS = 64  # of the keys: one token with 8 key/value heads then fills the largest GPUs
MERGED_BY_WARP = 2048  # elements of all parts of a row that one warp merges
PROGRAMS = 3  # that a multiprocessor has registers for
LARGE_PROGRAMS = 2  # likewise, of MAX_ROWS rows, of a head larger than MAX_SIZE, or in float32
MIN_BLOCKS = tl.constexpr(4)  # of a part: smaller parts take as long, and more of them must be merged
NO_LIMIT = tl.constexpr((1 << 31) - 1)  # lowest visible position of rows outside of the tile: they see nothing


@triton.jit
def find_tile(
    table, tile,
    WIDTH: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK_TABLE: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Return (table row, tile within the row's sequence) of a tile; row >= NUM_ROWS past the last tile.

    A tile is up to BLOCK_ROWS queries of one sequence: the g queries of a token, then those of the next token. The
    table's token counts determine which sequence a tile belongs to.
    """
    each = tl.arange(0, BLOCK_TABLE)
    counts = tl.load(table + each * WIDTH + 1, mask=each < NUM_ROWS, other=0).to(tl.int32)
    tiles = (counts * GROUPS + BLOCK_ROWS - 1) // BLOCK_ROWS
    own_row = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    return own_row, tile - tl.sum(tl.where(each < own_row, tiles, 0), 0)


@triton.jit
def add_block(q, k, v, seen, scale, largest, weight_sum, sums):
    """Attend to one block's keys; return the updated (largest score, weight sum, weighted value sum)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    # An online softmax (Milakov and Gimelshein, arXiv 1805.02867).
    larger = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # rows that have seen no key yet: avoid NaN
    weights = tl.exp(scores - shift[:, None])
    fading = tl.exp(largest - shift)
    weight_sum = weight_sum * fading + tl.sum(weights, 1)
    sums = sums * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return larger, weight_sum, sums


@triton.jit(do_not_specialize=["num_tokens", "num_words", "num_parts", "column"])  # compiles few variants
def _attend_part(
    query, lowest, positions, words, table, sinks, output, total, num_used,
    scale, num_tokens, num_words, num_parts, token_stride, head_stride, column,
    WIDTH: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK_TABLE: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, HAS_PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend to one part of a sequence's keys; one program per key/value head, part and tile.

    Keys are divided into blocks: first those of the committed tokens, then those of the tree, whose blocks begin at a
    multiple of BLOCK_KEYS fed tokens, so that a token's mask of a block lies in one of its words. A tile may see too
    few keys for all parts: programs of parts without keys end at once, and the first part's program stores how many
    parts have keys.
    """
    head, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(0)
    own_row, own_tile = find_tile(table, tile, WIDTH, NUM_ROWS, BLOCK_TABLE, GROUPS, BLOCK_ROWS)
    if own_row < NUM_ROWS:  # the grid has tiles for the worst split of the tokens into sequences
        row = table + own_row * WIDTH
        first, num_own = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
        num_committed, capacity = tl.load(row + 2).to(tl.int32), tl.load(row + 3)
        pointer = tl.pointer_type(query.dtype.element_ty)
        keys = tl.multiple_of(tl.load(row + column).to(pointer), 16)
        values = tl.multiple_of(tl.load(row + column + 1).to(pointer), 16)
        index = own_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = index < num_own * GROUPS
        token, query_head = first + index // GROUPS, head * GROUPS + index % GROUPS
        low = tl.load(lowest + token, mask=is_row, other=NO_LIMIT).to(tl.int32)
        dims = tl.arange(0, BLOCK_SIZE)
        inside = dims < SIZE
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        query_places = token[:, None].to(tl.int64) * token_stride + query_head[:, None] * head_stride + dims[None, :]
        q = tl.load(query + query_places, mask=is_row[:, None] & inside[None, :], other=0.0)
        begin = tl.minimum(tl.min(low, 0), num_committed)
        num_before = tl.cdiv(num_committed - begin, BLOCK_KEYS)
        num_blocks = num_before + tl.cdiv(num_own, BLOCK_KEYS)
        num_blocks = tl.where(capacity > 0, num_blocks, 0)  # padding sees nothing
        part_blocks = tl.maximum(tl.cdiv(num_blocks, num_parts), MIN_BLOCKS)
        used = tl.cdiv(num_blocks, part_blocks)
        if HAS_PARTS:
            used_places = token.to(tl.int64) * num_heads * GROUPS + query_head
            if part == 0:
                tl.store(num_used + used_places, used, mask=is_row)
        else:
            used = 1  # without a merge, this program also writes rows that see no keys
        if part < used:
            first_block = part * part_blocks
            end_block = tl.minimum(first_block + part_blocks, num_blocks)
            each = tl.arange(0, BLOCK_KEYS)
            cells = each[:, None] * SIZE + dims[None, :]
            cache_start = head.to(tl.int64) * capacity * SIZE
            keys += cache_start
            values += cache_start
            half_words = words.to(tl.pointer_type(tl.int32))  # lower half first; int32 takes half the registers
            largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
            sums = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
            for block in range(first_block, tl.minimum(end_block, num_before)):
                start = begin + block * BLOCK_KEYS
                is_key = start + each < num_committed
                there = is_key[:, None] & inside[None, :]
                k = tl.load(keys + start.to(tl.int64) * SIZE + cells, mask=there, other=0.0)
                v = tl.load(values + start.to(tl.int64) * SIZE + cells, mask=there, other=0.0)
                seen = is_key[None, :] & (start + each[None, :] >= low[:, None])
                largest, weight_sum, sums = add_block(q, k, v, seen, scale, largest, weight_sum, sums)
            for block in range(tl.maximum(first_block, num_before), end_block):
                start = (block - num_before) * BLOCK_KEYS  # in the tree
                is_key = start + each < num_own
                there = is_key[:, None] & inside[None, :]
                slot = (num_committed + start).to(tl.int64)
                k = tl.load(keys + slot * SIZE + cells, mask=there, other=0.0)
                v = tl.load(values + slot * SIZE + cells, mask=there, other=0.0)
                at = tl.load(positions + first + start + each, mask=is_key, other=0).to(tl.int32)
                word = tl.load(half_words + token * (2 * num_words) + (start >> 5), mask=is_row, other=-1)
                is_ancestor = ((word[:, None] >> ((start + each) & 31)[None, :]) & 1) != 0
                seen = is_key[None, :] & (at[None, :] >= low[:, None]) & is_ancestor
                largest, weight_sum, sums = add_block(q, k, v, seen, scale, largest, weight_sum, sums)
            is_empty = weight_sum == 0.0
            weight_sum = tl.where(is_empty, 1.0, weight_sum)
            sums = sums / weight_sum[:, None]
            log_sum = tl.where(is_empty, float("-inf"), largest + tl.log(weight_sum))
            if HAS_SINKS and not HAS_PARTS:
                sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32)
                sums = sums * tl.sigmoid(log_sum - sink)[:, None]
            places = (part * num_tokens + token).to(tl.int64) * num_heads * GROUPS + query_head
            tl.store(output + places[:, None] * SIZE + dims[None, :], sums, mask=is_row[:, None] & inside[None, :])
            if HAS_PARTS:
                tl.store(total + places, log_sum, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_parts(
    outputs, totals, num_used, sinks, merged, num_rows,
    QUERY_HEADS: tl.constexpr, SIZE: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row that were written, the query of one token and head; one program per row."""
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_SIZE)
    total = tl.load(totals + parts * num_rows + row, mask=parts < tl.load(num_used + row), other=float("-inf"))
    has_keys, inside = total > float("-inf"), dims < SIZE
    largest = tl.max(total, 0)
    weights = tl.exp(total - tl.where(largest == float("-inf"), 0.0, largest))
    places = (parts[:, None] * num_rows + row) * SIZE + dims[None, :]
    output = tl.load(outputs + places, mask=has_keys[:, None] & inside[None, :], other=0.0)
    weight_sum = tl.sum(weights, 0)
    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    result = tl.sum(output * weights[:, None], 0) / weight_sum
    if HAS_SINKS:
        sink = tl.load(sinks + row % QUERY_HEADS).to(tl.float32)
        result = result * tl.sigmoid(largest + tl.log(weight_sum) - sink)
    tl.store(merged + row * SIZE + dims, result, mask=inside)


def attend(
    query: torch.Tensor,  # [1, g H, B, D]; the last dimension contiguous. The result has the same dtype.
    num_heads: int,  # H
    lowest: torch.Tensor,  # [B] int64, the lowest position that each token may see
    positions: torch.Tensor,  # [B] int64, absolute
    # [B, W] int64: bit i of a token's words, lowest first, is set if the token sees fed token i of its sequence.
    words: torch.Tensor,
    table: torch.Tensor,  # [P, 4 + 2 layers] int64; the tree's keys and values must have been written
    layer: int,
    scale: float,
    num_processors: int,  # multiprocessors of the GPU; determines into how many parts the keys are split
    # [g H] attention sinks: an additional score per head in the softmax's sum, without a value. None for none.
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention to committed tokens and ancestors, [1, B, g H, D]; 0 for padding."""
    assert query.stride(3) == 1 and words.is_contiguous() and table.is_contiguous()
    assert sinks is None or sinks.is_contiguous()
    _, num_queries, num_tokens, size = query.shape
    groups, num_rows = num_queries // num_heads, len(table)
    block = blocks(groups * num_tokens, size, query.element_size())
    num_tiles = triton.cdiv(groups * num_tokens, block["BLOCK_ROWS"])
    num_parts = parts_of(block, num_heads * num_tiles, num_processors, query.element_size())
    result = torch.empty((1, num_tokens, num_queries, size), dtype=query.dtype, device=query.device)
    shape = (num_parts, num_tokens, num_queries)
    output = result if num_parts == 1 else torch.empty((*shape, size), dtype=torch.float32, device=query.device)
    total = torch.empty(shape, dtype=torch.float32, device=query.device)
    num_used = torch.empty(shape[1:], dtype=torch.int32, device=query.device)
    _attend_part[(num_heads, num_parts, num_tiles + min(num_rows, num_tokens) - 1)](
        query, lowest, positions, words, table, query if sinks is None else sinks, output, total, num_used,
        scale, num_tokens, words.shape[1], num_parts, query.stride(2), query.stride(1), HEADER + 2 * layer,
        WIDTH=table.shape[1], NUM_ROWS=num_rows, BLOCK_TABLE=triton.next_power_of_2(num_rows),
        GROUPS=groups, SIZE=size, HAS_PARTS=num_parts > 1, HAS_SINKS=sinks is not None,
        num_warps=num_warps(query.element_size()), num_stages=num_stages(block, query.element_size()),
        **block, **early_launch(query.device),
    )  # fmt: skip
    if num_parts > 1:
        count, block_parts = num_tokens * num_queries, triton.next_power_of_2(num_parts)
        _merge_parts[(count,)](
            output, total, num_used, query if sinks is None else sinks, result, count,
            QUERY_HEADS=num_queries, SIZE=size, HAS_SINKS=sinks is not None,
            BLOCK_PARTS=block_parts, BLOCK_SIZE=block["BLOCK_SIZE"],
            num_warps=max(1, min(4, block_parts * block["BLOCK_SIZE"] // MERGED_BY_WARP)), **early_launch(query.device),
        )  # fmt: skip
    return result


def blocks(num_rows: int, size: int, num_bytes: int) -> dict[str, int]:
    """Return the block sizes of `_attend_part` (rows, keys, dimensions of a program) as keyword arguments.

    They fit the registers and shared memory of GPUs of compute capability 8.0 and higher. `num_rows` is g B, `size` is
    D.
    """
    block_size = max(MIN_BLOCK, triton.next_power_of_2(size))
    max_rows = (MAX_ROWS if size <= MAX_SIZE else MAX_LARGE_ROWS) if num_bytes == 2 else MAX_FLOAT_ROWS
    return {
        "BLOCK_ROWS": min(max_rows, max(MIN_BLOCK, triton.next_power_of_2(num_rows))),
        "BLOCK_KEYS": min(MAX_KEYS, max(MIN_BLOCK, KEY_BYTES // (block_size * num_bytes))),
        "BLOCK_SIZE": block_size,
    }


def parts_of(block: dict[str, int], num_programs: int, num_processors: int, num_bytes: int) -> int:
    """Return into how many parts to split the keys: as many as run at once; more need a second round.

    `num_programs` are the tiles of all key/value heads: the programs of `_attend_part` with one part.
    """
    is_large = block["BLOCK_ROWS"] == MAX_ROWS or block["BLOCK_SIZE"] > MAX_SIZE or num_bytes == 4
    at_once = num_processors * (LARGE_PROGRAMS if is_large else PROGRAMS)
    return max(1, min(MAX_PARTS, at_once // num_programs))


def num_stages(block: dict[str, int], num_bytes: int) -> int:
    return 3 if block["BLOCK_KEYS"] * block["BLOCK_SIZE"] * num_bytes <= STAGED_BYTES else 2


def num_warps(num_bytes: int) -> int:
    """Return how many warps a program of attention needs to spill no registers, by an element's size."""
    return 8 if num_bytes == 4 else 4
