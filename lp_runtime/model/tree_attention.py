"""Attention for a token tree: over the committed prefix without a mask, over the tree with one, merged.

Every token of a tree sees the whole committed prefix, so attention to it needs no mask, and the fastest kernels there
are can do it; only the tree's own T x T part has a mask. Both give their scores' log-sum-exp, by which the two are
merged (as in split-key decoding). The queries of all heads that share a key/value head are folded into one longer row
of queries, so keys and values are never repeated.

Letters: T tokens of the tree, L committed tokens, H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "lp_runtime_tree"
FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_HEAD = 256


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface.

    Args:
        query: [1, g H, T, D].
        key, value: [1, H, L + T, D].
        attention_mask: [1, 1, T, T], of the tree alone: additive, in the type of the query. With any other mask, or
            without one, this is transformers' sdpa.
        scaling: of the scores; default 1 / sqrt(D).
        kwargs: of sdpa.

    Returns:
        ([1, T, g H, D], None)
    """
    num_tokens, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None or attention_mask.shape[-1] != num_tokens or num_keys == num_tokens:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    num_heads, size = key.shape[1], query.shape[3]
    groups = query.shape[1] // num_heads
    scale = size**-0.5 if scaling is None else scaling
    num_cached = num_keys - num_tokens
    folded = query.reshape(1, num_heads, groups * num_tokens, size)
    prefix, prefix_sum = attend(folded, key[:, :, :num_cached], value[:, :, :num_cached], scale)
    tree, tree_sum = attend_masked(
        folded, key[:, :, num_cached:], value[:, :, num_cached:], attention_mask[0, 0], scale
    )
    share = torch.sigmoid(prefix_sum - tree_sum)[..., None]  # of the weights, the prefix's
    output = torch.lerp(tree, prefix.float(), share).to(query.dtype)
    output = output.view(1, num_heads * groups, num_tokens, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask.

    Args:
        query: [1, H, n, D].
        key, value: [1, H, L, D].

    Returns:
        (output, log-sum-exp): [1, H, n, D], and [1, H, n] float32.
    """
    aten = torch.ops.aten
    if query.device.type == "cpu" and query.shape[3] == value.shape[3]:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, scale=scale)
    if query.device.type == "cuda" and query.shape[3] == value.shape[3]:
        if query.dtype in FLASH_DTYPES and query.shape[3] <= MAX_FLASH_HEAD and query.shape[3] % 8 == 0:
            output, total, *_ = aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, False, False, scale=scale
            )
            return output, total
        output, total, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, False, scale=scale
        )
        return output, total[..., : query.shape[2]]  # it is filled up to a multiple of its own
    return attend_masked(query, key, value, None, scale)


def attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of few keys, as two matrix products, in float32.

    Args:
        query: [1, H, g n, D].
        key, value: [1, H, S, D].
        mask: [n, S] additive; None for none.

    Returns:
        (output, log-sum-exp): [1, H, g n, D] and [1, H, g n], float32.
    """
    scores = torch.matmul(query.float(), key.transpose(2, 3).float()) * scale
    if mask is not None:
        scores = (scores.unflatten(2, (-1, len(mask))) + mask).flatten(2, 3)
    total = scores.logsumexp(-1)
    return torch.matmul(torch.exp(scores - total[..., None]), value.float()), total


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
