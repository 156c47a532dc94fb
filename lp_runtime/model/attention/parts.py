"""Attention to parts of the keys, with the fastest kernels of torch, and the merge of two parts.

Each part has the log-sum-exp of its scores, with which two parts are merged (as in split-key decoding) and attention
sinks are added.

Letters: T tokens fed, L committed tokens, H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

import torch

FLASH_DTYPES = (torch.float16, torch.bfloat16)  # supported by torch's flash attention
MAX_FLASH_HEAD_SIZE = 256  # largest D of torch's flash attention
MIN_FLASH_CAPABILITY = (8, 0)  # torch's flash attention needs Ampere or newer


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention supports a GPU and dtype."""
    return dtype in FLASH_DTYPES and torch.cuda.get_device_capability(device) >= MIN_FLASH_CAPABILITY


def merge(prefix: torch.Tensor, prefix_sum: torch.Tensor, tree: torch.Tensor, tree_sum: torch.Tensor) -> torch.Tensor:
    """Return attention over prefix and tree from attention over each, [..., D] float32.

    `prefix` and `tree` are [..., D], `tree` in float32; the sums are the log-sum-exp of their scores, [...].
    """
    prefix_weight = torch.sigmoid(prefix_sum - tree_sum)[..., None]
    return torch.lerp(tree, prefix.float(), prefix_weight)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys, or causally, without a mask, by the fastest torch kernel for device and dtype.

    `query` is [1, g H, n, D], `key` and `value` [1, H, L, D]; `scale` multiplies the scores. With `is_causal`, query i
    sees only the keys up to i, and n = L. Returns output, [1, g H, n, D], and log-sum-exp, [1, g H, n] float32.
    """
    num_heads, num_rows, size = query.shape[1:]
    groups = num_heads // key.shape[1]
    if groups == 1 or _accepts_groups(query, value):
        return _attend(query, key, value, scale, is_causal)
    if is_causal:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        return _attend(query, key, value, scale, is_causal)
    folded = query.reshape(1, key.shape[1], groups * num_rows, size)
    output, total = _attend(folded, key, value, scale, False)
    return output.reshape(1, num_heads, num_rows, -1), total.reshape(1, num_heads, num_rows)


def _accepts_groups(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `_attend` will use flash attention on a GPU, which needs no repeated keys for grouped heads."""
    size = query.shape[3]
    fits = size == value.shape[3] and size <= MAX_FLASH_HEAD_SIZE and size % 8 == 0
    return query.device.type == "cuda" and fits and has_flash(query.device, query.dtype)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attend` for as many query heads as key heads; for grouped heads if `_accepts_groups`."""
    aten = torch.ops.aten
    if query.device.type == "cpu" and query.shape[3] == value.shape[3]:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    if _accepts_groups(query, value):
        output, total, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return output, total
    if query.device.type == "cuda" and query.shape[3] == value.shape[3]:
        output, total, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return output, total[..., : query.shape[2]]  # the kernel pads the log-sum-exp
    assert not is_causal
    return attend_masked(query, key, value, None, scale)


def attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a few keys by two matrix products in float32.

    `query` is [1, H, g n, D], `key` and `value` [1, H, S, D], `mask` [n, S] additive; `scale` multiplies the scores.
    Returns output, [1, H, g n, D], and log-sum-exp, [1, H, g n], float32.
    """
    scores = torch.matmul(query.float(), key.transpose(2, 3).float()) * scale
    if mask is not None:
        scores = (scores.unflatten(2, (-1, len(mask))) + mask).flatten(2, 3)
    total = scores.logsumexp(-1)
    return torch.matmul(torch.exp(scores - total[..., None]), value.float()), total
