"""Triton kernels between matrix products, for the tokens of a tree.

They rotate queries and keys and write keys and values into the cache; attend to the committed tokens and to the tree;
gate the MLP. The number of committed tokens is read on the device, so a CUDA graph of the kernels can be replayed with
a longer sequence. The kernels of triton_norm.py, triton_sampling.py and triton_cut.py are found here, too. All need
Triton (tests run them in Triton's interpreter).

Letters: T tokens of the tree, L committed tokens, H key/value heads, g query heads for each, D head size, P parts that
the keys are attended to in, F the MLP's inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lp_runtime.kernels.triton_cut import can_cut as can_cut  # all kernels are found in this module
from lp_runtime.kernels.triton_cut import cut_scores as cut_scores
from lp_runtime.kernels.triton_cut import find_cut as find_cut
from lp_runtime.kernels.triton_norm import add_and_norm as add_and_norm
from lp_runtime.kernels.triton_norm import can_add_and_norm as can_add_and_norm
from lp_runtime.kernels.triton_sampling import sample_and_pack as sample_and_pack

MIN_BLOCK = 16  # rows and columns that a tensor core takes
MAX_ROWS = 32  # of a program, in half precision: with more, registers are spilled
MAX_FLOAT_ROWS = 16  # of a program, in float32
MAX_KEYS = 64  # that a program holds at once
KEY_BYTES = 1 << 14  # of the keys that a program holds at once: shared memory of the smallest GPUs suffices
MAX_PARTS = 16  # of the keys: to merge more takes longer than they save
PROGRAMS_PER_PROCESSOR = 2  # so many hide each other's latency on a multiprocessor
GATE_BLOCK = 1024  # elements of a program


@triton.jit
def _rotate_and_write(
    query, key, value, cos, sin, length, rotated, keys, values,
    query_stride, key_stride, value_stride, capacity,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate or write one head of one token; a program for each token and each head of queries, keys and values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.arange(0, BLOCK)
    second = first + HALF
    inside = first < HALF
    size = 2 * HALF
    slot = tl.load(length) + token
    if head < QUERY_HEADS:
        source = query + token * query_stride + head * size
        target = rotated + (token * QUERY_HEADS + head) * size
    elif head < QUERY_HEADS + KEY_HEADS:
        source = key + token * key_stride + (head - QUERY_HEADS) * size
        target = keys + ((head - QUERY_HEADS) * capacity + slot) * size
    else:
        source = value + token * value_stride + (head - QUERY_HEADS - KEY_HEADS) * size
        target = values + ((head - QUERY_HEADS - KEY_HEADS) * capacity + slot) * size
    low = tl.load(source + first, mask=inside).to(tl.float32)
    high = tl.load(source + second, mask=inside).to(tl.float32)
    if head < QUERY_HEADS + KEY_HEADS:
        angles = token * size
        low_cos = tl.load(cos + angles + first, mask=inside).to(tl.float32)
        high_cos = tl.load(cos + angles + second, mask=inside).to(tl.float32)
        low_sin = tl.load(sin + angles + first, mask=inside).to(tl.float32)
        high_sin = tl.load(sin + angles + second, mask=inside).to(tl.float32)
        tl.store(target + first, low * low_cos - high * low_sin, mask=inside)
        tl.store(target + second, high * high_cos + low * high_sin, mask=inside)
    else:
        tl.store(target + first, low, mask=inside)
        tl.store(target + second, high, mask=inside)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    length: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and write keys and values behind the committed ones of a cache.

    Rotary embedding is x cos + (-x2, x1) sin, with x1 and x2 the halves of x.

    Args:
        query: [1, T, g H, D]; a token's heads one behind the other.
        key: [1, T, H, D]; likewise.
        value: [1, T, H, D]; likewise.
        cos: [1, T, D].
        sin: [1, T, D].
        length: [1] int64, L.
        keys: [1, H, capacity, D], written to.
        values: [1, H, capacity, D], written to.

    Returns:
        [1, T, g H, D] rotated queries.
    """
    _, num_tokens, num_queries, size = query.shape
    num_keys = key.shape[2]
    assert all(each.stride()[2:] == (size, 1) for each in (query, key, value))
    assert keys.is_contiguous() and values.is_contiguous() and num_tokens <= keys.shape[2]
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rotate_and_write[(num_tokens, num_queries + 2 * num_keys)](
        query, key, value, cos.contiguous(), sin.contiguous(), length, rotated, keys, values,
        query.stride(1), key.stride(1), value.stride(1), keys.shape[2],
        QUERY_HEADS=num_queries, KEY_HEADS=num_keys, HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return rotated


@triton.jit
def _attend_part(
    query, keys, values, mask, length, output, total,
    scale, num_tokens, token_stride, head_stride, capacity,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the keys; a program for each key/value head, each part and each block of rows.

    A row is a token's query with one of the g heads. The softmax is computed online (Milakov and Gimelshein, arXiv
    1805.02867).
    """
    head, part = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, query_head = rows // GROUPS, head * GROUPS + rows % GROUPS
    is_row = token < num_tokens
    dims = tl.arange(0, BLOCK_SIZE)
    inside = dims < SIZE
    num_committed = tl.load(length).to(tl.int32)
    num_keys = num_committed + num_tokens
    part_size = tl.cdiv(tl.cdiv(num_keys, NUM_PARTS), BLOCK_KEYS) * BLOCK_KEYS
    end = tl.minimum((part + 1) * part_size, num_keys)

    places = token[:, None] * token_stride + query_head[:, None] * head_stride + dims[None, :]
    q = tl.load(query + places, mask=is_row[:, None] & inside[None, :], other=0.0)
    cache_start = head.to(tl.int64) * capacity * SIZE
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
    for start in range(part * part_size, end, BLOCK_KEYS):
        slots = start + tl.arange(0, BLOCK_KEYS)
        is_key = slots < end
        cells = cache_start + slots[:, None] * SIZE + dims[None, :]
        seen = is_key[:, None] & inside[None, :]
        k = tl.load(keys + cells, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if start + BLOCK_KEYS > num_committed:
            column = slots - num_committed  # of the tree's own part
            is_tree = is_row[:, None] & (is_key & (column >= 0))[None, :]
            added = tl.load(mask + token[:, None] * num_tokens + column[None, :], mask=is_tree, other=0.0)
            scores += added.to(tl.float32)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        fading = tl.exp(largest - larger)
        weight_sum = weight_sum * fading + tl.sum(weights, 1)
        v = tl.load(values + cells, mask=seen, other=0.0)
        sums = sums * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger
    is_empty = weight_sum == 0.0
    weight_sum = tl.where(is_empty, 1.0, weight_sum)
    places = (part * num_tokens + token) * num_heads * GROUPS + query_head
    sums = sums / weight_sum[:, None]
    tl.store(output + places[:, None] * SIZE + dims[None, :], sums, mask=is_row[:, None] & inside[None, :])
    if NUM_PARTS > 1:
        tl.store(total + places, tl.where(is_empty, float("-inf"), largest + tl.log(weight_sum)), mask=is_row)


@triton.jit
def _merge_parts(
    outputs, totals, merged, num_rows,
    SIZE: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, a token's query with one head; a program for each row."""
    row = tl.program_id(0)
    parts, dims = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_SIZE)
    is_part, inside = parts < NUM_PARTS, dims < SIZE
    total = tl.load(totals + parts * num_rows + row, mask=is_part, other=float("-inf"))
    weights = tl.exp(total - tl.max(total, 0))
    places = (parts[:, None] * num_rows + row) * SIZE + dims[None, :]
    output = tl.load(outputs + places, mask=is_part[:, None] & inside[None, :], other=0.0)
    result = tl.sum(output * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(merged + row * SIZE + dims, result, mask=inside)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    num_processors: int,
) -> torch.Tensor:
    """Return the attention to the committed tokens, without a mask, and to the tree's own, with one.

    Args:
        query: [1, g H, T, D]; the last dimension contiguous.
        keys: [1, H, capacity, D], contiguous: of the committed tokens, then of the tree; whatever lies behind is
            ignored.
        values: [1, H, capacity, D], contiguous; likewise.
        mask: [T, T], added to the scores of the tree's own part; contiguous.
        length: [1] int64, L.
        scale: factor of the scores.
        num_processors: multiprocessors of the GPU, which the keys are divided among.

    Returns:
        [1, T, g H, D], of the query's type.
    """
    assert query.stride(3) == 1 and keys.is_contiguous() and values.is_contiguous() and mask.is_contiguous()
    _, num_queries, num_tokens, size = query.shape
    _, num_heads, capacity, _ = keys.shape
    groups = num_queries // num_heads
    block = blocks(groups * num_tokens, size, keys.element_size())
    num_blocks = triton.cdiv(groups * num_tokens, block["BLOCK_ROWS"])
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * num_processors, num_heads * num_blocks)
    num_parts = max(1, min(wanted, MAX_PARTS, triton.cdiv(capacity, block["BLOCK_KEYS"])))
    result = torch.empty((1, num_tokens, num_queries, size), dtype=query.dtype, device=query.device)
    shape = (num_parts, num_tokens, num_queries)
    output = result if num_parts == 1 else torch.empty((*shape, size), dtype=torch.float32, device=query.device)
    total = torch.empty(shape, dtype=torch.float32, device=query.device)
    _attend_part[(num_heads, num_parts, num_blocks)](
        query, keys, values, mask, length, output, total,
        scale, num_tokens, query.stride(2), query.stride(1), capacity,
        GROUPS=groups, SIZE=size, NUM_PARTS=num_parts, num_stages=2, **block,
    )  # fmt: skip
    if num_parts > 1:
        num_rows = num_tokens * num_queries
        _merge_parts[(num_rows,)](
            output, total, result, num_rows,
            SIZE=size, NUM_PARTS=num_parts, BLOCK_PARTS=triton.next_power_of_2(num_parts),
            BLOCK_SIZE=block["BLOCK_SIZE"],
        )  # fmt: skip
    return result


def blocks(num_rows: int, size: int, num_bytes: int) -> dict[str, int]:
    """Return how many rows, keys and dimensions a program of `_attend_part` holds, by the names of its constants.

    They fit the registers and the shared memory of GPUs of compute capability 8.0 and up.

    Args:
        num_rows: g T.
        size: D.
        num_bytes: bytes of an element.
    """
    block_size = max(MIN_BLOCK, triton.next_power_of_2(size))
    max_rows = MAX_ROWS if num_bytes == 2 else MAX_FLOAT_ROWS
    return {
        "BLOCK_ROWS": min(max_rows, max(MIN_BLOCK, triton.next_power_of_2(num_rows))),
        "BLOCK_KEYS": min(MAX_KEYS, max(MIN_BLOCK, KEY_BYTES // (block_size * num_bytes))),
        "BLOCK_SIZE": block_size,
    }


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
