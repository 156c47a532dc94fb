"""Attention for a token tree, in which keys and values are never repeated.

The queries of all heads that share a key/value head are folded into one longer row of queries. On a CPU they attend in
one call, with a mask. On a GPU a mask would turn the fastest kernels off, and none is needed for most of the work:
every token of a tree sees the whole committed prefix. So attention goes over the prefix without a mask, over the
tree's own T x T part with one, and the two are merged by the log-sum-exp of their scores (as in split-key decoding).

Letters: T tokens of the tree, L committed tokens, H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "lp_runtime_tree"
FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_HEAD = 256
FLASH_CAPABILITY = (8, 0)  # of the GPU, at least


class Committed(NamedTuple):
    """How many tokens are committed, where only the device knows.

    Attributes:
        slots: [T] int64, where the tree's own keys and values stand in the cache.
        length: [1] int64, L.
        kernels: triton_gpu.py where it can be used, else None.
        num_processors: multiprocessors of the device.
    """

    slots: torch.Tensor
    length: torch.Tensor
    kernels: ModuleType | None = None
    num_processors: int = 1


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention runs on a GPU in a type."""
    return dtype in FLASH_DTYPES and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    committed: Committed | None = None,
    together: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface.

    Args:
        query: [1, g H, T, D].
        key, value: [1, H, L + T, D].
        attention_mask: additive, in the type of the query: [1, 1, T, L + T], or [1, 1, T, T], of the tree alone. With
            any other mask, or without one, this is transformers' sdpa.
        scaling: of the scores; default 1 / sqrt(D).
        committed: where L is known on the device only: key and value are the whole memory of the cache then, and the
            mask is of the tree alone.
        together: a BatchedCache where the tokens are of several texts: it has their keys, values and masks.
        kwargs: of sdpa.

    Returns:
        ([1, T, g H, D], None)
    """
    if together is not None:
        *queries, filling = query.split(together.sizes, 2)
        parts = zip(queries, together.states, together.masks_of(attention_mask), strict=True)
        outputs = [tree_attention(module, part, *states, mask, scaling, **kwargs)[0] for part, states, mask in parts]
        outputs.append(query.new_zeros((1, filling.shape[2], query.shape[1], value.shape[3])))
        return torch.cat(outputs, 1), None
    num_tokens, num_keys, num_heads, size = query.shape[2], key.shape[2], key.shape[1], query.shape[3]
    groups = query.shape[1] // num_heads
    num_columns = attention_mask.shape[-1] if attention_mask is not None and attention_mask.dtype == query.dtype else 0
    if committed is None and num_columns not in (num_tokens, num_keys):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = size**-0.5 if scaling is None else scaling
    if committed is not None and committed.kernels and size == value.shape[3]:
        mask = attention_mask[0, 0]
        attend_to_all = committed.kernels.attend
        return attend_to_all(query, key, value, mask, committed.length, scale, committed.num_processors), None
    folded = query.reshape(1, num_heads, groups * num_tokens, size)
    if committed is not None:
        tree_key, tree_value = (each.index_select(2, committed.slots) for each in (key, value))
        tree = attend_masked(folded, tree_key, tree_value, attention_mask[0, 0], scale)
        output = merge(*attend_committed(folded, key, value, committed, scale), *tree).to(query.dtype)
    elif num_columns == num_keys:
        output = torch.nn.functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=_fold(attention_mask, groups), scale=scaling
        )
    else:
        output = attend_apart(folded, key, value, attention_mask[0, 0], scale)
    output = output.reshape(1, num_heads * groups, num_tokens, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


@functools.lru_cache(maxsize=16)  # by identity: all layers of a step are given the same masks
def _fold(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """[1, 1, g T, S]: the rows of a mask g times over."""
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def attend_apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over the prefix without a mask and over the tree with one, merged.

    Args:
        query: [1, H, g T, D].
        key, value: [1, H, L + T, D].
        mask: [T, T] additive.

    Returns:
        [1, H, g T, D]
    """
    num_cached = key.shape[2] - len(mask)
    prefix = attend(query, key[:, :, :num_cached], value[:, :, :num_cached], scale)
    tree = attend_masked(query, key[:, :, num_cached:], value[:, :, num_cached:], mask, scale)
    return merge(*prefix, *tree).to(query.dtype)


def merge(prefix: torch.Tensor, prefix_sum: torch.Tensor, tree: torch.Tensor, tree_sum: torch.Tensor) -> torch.Tensor:
    """Attention over prefix and tree together, float32, from either's output, [..., D], and log-sum-exp, [...]."""
    share = torch.sigmoid(prefix_sum - tree_sum)[..., None]  # of the weights, the prefix's
    return torch.lerp(tree, prefix.float(), share)


def attend_committed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, committed: Committed, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask over the committed tokens, whose number is known on the device only.

    Args:
        query: [1, H, n, D].
        key, value: [1, H, capacity, D]; what lies behind the committed tokens may be anything.

    Returns:
        (output, log-sum-exp): [1, H, n, D], and [1, H, n], float32.
    """
    hidden = torch.arange(key.shape[2], device=key.device) >= committed.length
    scores = torch.matmul(query.float(), key.transpose(2, 3).float()) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.logsumexp(-1)
    values = value.float().masked_fill(hidden[:, None], 0)
    return torch.matmul(torch.exp(scores - total[..., None]), values), total


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
        fits = query.shape[3] <= MAX_FLASH_HEAD and query.shape[3] % 8 == 0
        if fits and has_flash(query.device, query.dtype):
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
