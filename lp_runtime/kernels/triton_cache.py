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

HEADER = 4  # integers in a row of the table before the addresses


@triton.jit(do_not_specialize=["column"])
def _rotate_and_write(
    query, key, value, cos, sin, owners, table, rotated,
    query_stride, key_stride, value_stride, column,
    WIDTH: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate and write one head of one token; one program per token and query, key or value head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.arange(0, BLOCK)
    second = first + HALF
    inside = first < HALF
    size = 2 * HALF
    is_query, is_value = head < QUERY_HEADS, head >= QUERY_HEADS + KEY_HEADS
    row = table + tl.load(owners + token) * WIDTH
    capacity = tl.load(row + 3)
    is_kept = inside & (is_query | (capacity > 0))  # padding has no cache
    if is_query:
        source = query + token * query_stride + head * size
        target = rotated + (token * QUERY_HEADS + head) * size
    else:
        own_head = head - QUERY_HEADS
        source = key + token * key_stride + own_head * size
        if is_value:
            own_head -= KEY_HEADS
            source = value + token * value_stride + own_head * size
        cache = tl.load(row + column + is_value.to(tl.int32)).to(tl.pointer_type(rotated.dtype.element_ty))
        slot = tl.load(row + 2) + token - tl.load(row)
        target = tl.multiple_of(cache, 16) + (own_head * capacity + slot) * size
    low = tl.load(source + first, mask=inside).to(tl.float32)
    high = tl.load(source + second, mask=inside).to(tl.float32)
    if is_value:
        tl.store(target + first, low, mask=is_kept)
        tl.store(target + second, high, mask=is_kept)
    else:
        angles = token * size
        low_cos = tl.load(cos + angles + first, mask=inside).to(tl.float32)
        high_cos = tl.load(cos + angles + second, mask=inside).to(tl.float32)
        low_sin = tl.load(sin + angles + first, mask=inside).to(tl.float32)
        high_sin = tl.load(sin + angles + second, mask=inside).to(tl.float32)
        tl.store(target + first, low * low_cos - high * low_sin, mask=is_kept)
        tl.store(target + second, high * high_cos + low * high_sin, mask=is_kept)


@torch.library.custom_op("lp_runtime::rotate_and_write", mutates_args=("table",))
def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    owners: torch.Tensor,
    table: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Write rotated keys, and values, after the committed ones; return rotated queries, [1, B, g H, D].

    Rotary embedding is x cos + (-x2, x1) sin, with x1 and x2 the halves of x.

    Args:
        query: [1, B, g H, D]; the heads of a token contiguous.
        key, value: [1, B, H, D]; likewise.
        cos, sin: [1, B, D].
        owners: [B] int64, each token's row in the table.
        table: [P, 4 + 2 layers] int64.
    """
    _, num_tokens, num_queries, size = query.shape
    num_keys = key.shape[2]
    assert all(each.stride()[2:] == (size, 1) for each in (query, key, value)) and table.is_contiguous()
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rotate_and_write[(num_tokens, num_queries + 2 * num_keys)](
        query, key, value, cos.contiguous(), sin.contiguous(), owners, table, rotated,
        query.stride(1), key.stride(1), value.stride(1), HEADER + 2 * layer,
        WIDTH=table.shape[1], QUERY_HEADS=num_queries, KEY_HEADS=num_keys, HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2), num_warps=1,
    )  # fmt: skip
    return rotated


@rotate_and_write.register_fake
def _rotate_and_write_shapes(query: torch.Tensor, *args: object) -> torch.Tensor:
    """Return an empty tensor of the shape of `rotate_and_write`'s result, for torch.compile."""
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


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
    tl.store(cache + (head * capacity + slot) * SIZE + dims, state, mask=(dims < SIZE) & (capacity > 0))


@torch.library.custom_op("lp_runtime::write", mutates_args=("table",))
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
