"""Triton kernels that write KV caches in fixed-size passes, one of them with rotary embedding.

The caches' addresses are read on the device, from the table that triton_attention.py describes. This module needs
Triton (tests run it in Triton's interpreter).

Letters: B tokens of a pass, padding included; H key/value heads, g query heads for each, D head size; P rows of the
table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lp_runtime.kernels.early_launch import early_launch
from lp_runtime.kernels.types import Rotation

HEADER = 4  # integers in a row of the table before the addresses
PROGRAM_PAIRS = 1024  # pairs of dimensions that a program rotates
WARP_PAIRS = 256  # of them, those of a warp: 16 bytes of each half a thread


@triton.jit
def _dimensions(pairs, HALF: tl.constexpr, SIZE: tl.constexpr, NEIGHBORS: tl.constexpr):
    """Return both dimensions of each pair; those that are not rotated are pairs of neighbours after the others."""
    if NEIGHBORS:
        return 2 * pairs, 2 * pairs + 1
    if 2 * HALF == SIZE:
        return pairs, pairs + HALF
    is_rotated = pairs < HALF
    return tl.where(is_rotated, pairs, 2 * pairs), tl.where(is_rotated, pairs + HALF, 2 * pairs + 1)


@triton.jit(do_not_specialize=["column"])
def _rotate_and_write(
    query, key, value, cos, sin, query_weight, key_weight, owners, table, rotated,
    epsilon, query_stride, key_stride, value_stride, column,
    WIDTH: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr, NUM_ANGLES: tl.constexpr, NEIGHBORS: tl.constexpr,
    ANGLE_STEP: tl.constexpr, HAS_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and write heads of a token; one program per token and block of query, key or value heads.

    SIZE is D, and HALF the number of pairs that are rotated.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    QUERY_BLOCKS: tl.constexpr = (QUERY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KEY_BLOCKS: tl.constexpr = (KEY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    is_query, is_value = block < QUERY_BLOCKS, block >= QUERY_BLOCKS + KEY_BLOCKS
    pairs = tl.arange(0, BLOCK)[None, :]
    low_dims, high_dims = _dimensions(pairs, HALF, SIZE, NEIGHBORS)
    row = table + tl.load(owners + token) * WIDTH
    capacity = tl.load(row + 3)
    if is_query:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        inside = (head < QUERY_HEADS) & (pairs < SIZE // 2)
        is_kept = inside
        source = query + token * query_stride
        target = rotated + (token * QUERY_HEADS + head) * SIZE
        weight = query_weight
    else:
        block -= QUERY_BLOCKS
        source = key + token * key_stride
        weight = key_weight
        if is_value:
            block -= KEY_BLOCKS
            source = value + token * value_stride
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        inside = (head < KEY_HEADS) & (pairs < SIZE // 2)
        # Padding has no cache. Triton's interpreter takes no mask that is a comparison of scalars in part.
        is_kept = inside & (pairs < tl.where(capacity > 0, SIZE // 2, 0))
        cache = tl.load(row + column + is_value.to(tl.int32)).to(tl.pointer_type(rotated.dtype.element_ty))
        slot = tl.load(row + 2) + token - tl.load(row)
        target = tl.multiple_of(cache, 16) + (head * capacity + slot) * SIZE
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    low = tl.load(source + head * SIZE + low_dims, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + head * SIZE + high_dims, mask=inside, other=0.0).to(tl.float32)
    if is_value:
        tl.store(target + low_dims, low, mask=is_kept)
        tl.store(target + high_dims, high, mask=is_kept)
    else:
        if HAS_NORM:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
            scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
            low *= scale * tl.load(weight + low_dims, mask=pairs < SIZE // 2).to(tl.float32)
            high *= scale * tl.load(weight + high_dims, mask=pairs < SIZE // 2).to(tl.float32)
            # Round, as a separate norm would.
            low = low.to(rotated.dtype.element_ty).to(tl.float32)
            high = high.to(rotated.dtype.element_ty).to(tl.float32)
        low_angles = token * NUM_ANGLES + pairs * ANGLE_STEP
        high_angles = low_angles + (ANGLE_STEP - 1 if NEIGHBORS else NUM_ANGLES - HALF)
        low_cos = tl.load(cos + low_angles, mask=pairs < HALF, other=1.0).to(tl.float32)
        high_cos = tl.load(cos + high_angles, mask=pairs < HALF, other=1.0).to(tl.float32)
        low_sin = tl.load(sin + low_angles, mask=pairs < HALF, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + high_angles, mask=pairs < HALF, other=0.0).to(tl.float32)
        tl.store(target + low_dims, low * low_cos - high * low_sin, mask=is_kept)
        tl.store(target + high_dims, high * high_cos + low * high_sin, mask=is_kept)


def rotate_and_write(
    query: torch.Tensor,  # [1, B, g H, D]; the heads of a token contiguous
    key: torch.Tensor,  # [1, B, H, D]; likewise
    value: torch.Tensor,  # [1, B, H, D]; likewise
    cos: torch.Tensor,  # [1, B, columns]
    sin: torch.Tensor,  # likewise
    owners: torch.Tensor,  # [B] int64, each token's row in the table
    table: torch.Tensor,  # [P, 4 + 2 layers] int64
    layer: int,
    # [D] each, of one dtype: weights of RMS norms that are applied before the rotation. None for no norms.
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    epsilon: float,  # of the norms
    rotation: Rotation,
) -> torch.Tensor:
    """Write rotated keys, and values, after the committed ones; return rotated queries, [1, B, g H, D]."""
    _, num_tokens, num_queries, size = query.shape
    num_keys = key.shape[2]
    assert all(each.stride()[2:] == (size, 1) for each in (query, key, value)) and table.is_contiguous()
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block, block_heads = head_blocks(size // 2, num_queries)
    _rotate_and_write[(num_tokens, triton.cdiv(num_queries, block_heads) + 2 * triton.cdiv(num_keys, block_heads))](
        query, key, value, cos.contiguous(), sin.contiguous(),
        query if query_weight is None else query_weight, key if key_weight is None else key_weight, owners, table,
        rotated, epsilon, query.stride(1), key.stride(1), value.stride(1), HEADER + 2 * layer,
        WIDTH=table.shape[1], QUERY_HEADS=num_queries, KEY_HEADS=num_keys, SIZE=size,
        HALF=rotation.num_rotated(cos) // 2, BLOCK=block, BLOCK_HEADS=block_heads, NUM_ANGLES=cos.shape[2],
        NEIGHBORS=rotation.are_neighbors, ANGLE_STEP=rotation.angle_step, HAS_NORM=query_weight is not None,
        num_warps=max(1, block * block_heads // WARP_PAIRS), **early_launch(query.device),
    )  # fmt: skip
    return rotated


def head_blocks(half: int, num_queries: int) -> tuple[int, int]:
    """Return (pairs of dimensions, heads) of a `_rotate_and_write` program; `half` is D / 2, `num_queries` is g H."""
    block = triton.next_power_of_2(half)
    return block, min(triton.next_power_of_2(num_queries), max(1, PROGRAM_PAIRS // block))


@triton.jit(do_not_specialize=["column"])
def _write(
    states, owners, table, token_stride, head_stride, column,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one head of one token into the token's cache; one program per token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    row = table + tl.load(owners + token) * WIDTH
    capacity = tl.load(row + 3)
    cache = tl.multiple_of(tl.load(row + column).to(tl.pointer_type(states.dtype.element_ty)), 16)
    slot = tl.load(row + 2) + token - tl.load(row)
    state = tl.load(states + token * token_stride + head * head_stride + dims, mask=dims < SIZE)
    tl.store(cache + (head * capacity + slot) * SIZE + dims, state, mask=dims < tl.where(capacity > 0, SIZE, 0))


def write(key: torch.Tensor, value: torch.Tensor, owners: torch.Tensor, table: torch.Tensor, layer: int) -> None:
    """Write keys and values after the committed ones of their caches.

    `key` and `value` are [1, H, B, D], the last dimension contiguous; `owners`, [B] int64, has each token's row in
    `table`, [P, 4 + 2 layers] int64.
    """
    assert table.is_contiguous()
    for which, states in enumerate((key, value)):
        _, num_heads, num_tokens, size = states.shape
        assert states.stride(3) == 1
        _write[(num_tokens, num_heads)](
            states, owners, table, states.stride(2), states.stride(1), HEADER + 2 * layer + which,
            WIDTH=table.shape[1], SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip
