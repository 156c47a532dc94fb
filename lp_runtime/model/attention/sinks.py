"""Attention with sinks (gpt-oss): each head has one more score in the softmax's sum, without a value.

The output without a sink is scaled by the weight that the sink leaves to the keys: sigmoid(log-sum-exp - sink). Letters
and shapes are those of parts.py.
"""

from __future__ import annotations

import torch

from lp_runtime.model.attention.parts import attend, attend_after_prefix, attend_masked, attend_window


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return attention with sinks, [g H], in a pass of any size, [1, T, g H, D] and contiguous.

    `mask` is [1, 1, T, S] boolean or additive, with a sliding `window` of tokens or None; [1, 1, T, T] additive, of the
    tree alone; a `chunk_mask` (tree_attention.py); or None for causal attention.
    """
    num_tokens, num_keys = query.shape[2], key.shape[2]
    if mask is not None and mask.shape[-1] == num_keys:
        first = 0 if window is None else max(0, num_keys - num_tokens - window + 1)  # no token sees earlier keys
        output, total = attend_masked(
            query, key[:, :, first:], value[:, :, first:], _additive(mask[0, 0, :, first:]), scale
        )
    elif mask is not None and mask.shape[1] > 1:
        output, total = attend_window(query, key, value, scale, mask.shape[1] - 1)
    elif mask is None or (mask.shape[-1] == 0 and num_tokens in (1, num_keys)):
        output, total = attend(query, key, value, scale, is_causal=num_tokens > 1)
    else:
        additive = mask[0, 0] if mask.shape[-1] else None
        output, *sums = attend_after_prefix(query, key, value, num_tokens, scale, additive)
        total = torch.logaddexp(*sums)
    left = torch.sigmoid(total - sinks.float()[:, None])[..., None]  # weight left to the keys
    return (output.float() * left).to(query.dtype).transpose(1, 2).contiguous()


def _additive(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
