"""Attention with sinks (gpt-oss): each head has one more score in the softmax's sum, without a value.

The output without a sink is scaled by the weight that the sink leaves to the keys: sigmoid(log-sum-exp - sink).

Letters: T tokens fed, L committed tokens, S keys, H key/value heads, g query heads for each, D head size.
"""

from __future__ import annotations

import torch

from lp_runtime.model.attention.parts import attend, attend_masked, attend_window, merge


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return attention with sinks in a pass of any size, [1, T, g H, D] and contiguous.

    Args:
        query: [1, g H, T, D].
        key, value: [1, H, S, D].
        mask: [1, 1, T, S] boolean or additive; [1, 1, T, T] additive, of the tree alone; [1, 1 + w, T, 0] for a chunk
            of a prompt, with a sliding window of w tokens or, if w is 0, without one; None for causal attention.
        sinks: [g H].
        window: sliding window of an [1, 1, T, S] mask, in tokens; None for none.
    """
    num_tokens, num_keys = query.shape[2], key.shape[2]
    if mask is not None and mask.shape[-1] == num_keys:
        first = 0 if window is None else max(0, num_keys - num_tokens - window + 1)  # no token sees earlier keys
        additive = _additive(mask[0, 0, :, first:])
        output, total = _attend_folded(query, key[:, :, first:], value[:, :, first:], additive, scale)
    elif mask is not None and mask.shape[1] > 1:
        output, total = attend_window(query, key, value, scale, mask.shape[1] - 1)
    elif mask is None or (mask.shape[-1] == 0 and num_tokens in (1, num_keys)):
        output, total = attend(query, key, value, scale, is_causal=num_tokens > 1)
    else:
        num_cached = num_keys - num_tokens
        prefix, prefix_sum = attend(query, key[:, :, :num_cached], value[:, :, :num_cached], scale)
        own = key[:, :, num_cached:], value[:, :, num_cached:]
        if mask.shape[-1] == 0:
            tree, tree_sum = attend(query, *own, scale, is_causal=True)
        else:
            tree, tree_sum = _attend_folded(query, *own, mask[0, 0], scale)
        output, total = merge(prefix, prefix_sum, tree.float(), tree_sum), torch.logaddexp(prefix_sum, tree_sum)
    left = torch.sigmoid(total - sinks.float()[:, None])[..., None]  # weight left to the keys
    return (output.float() * left).to(query.dtype).transpose(1, 2).contiguous()


def _additive(mask: torch.Tensor) -> torch.Tensor:
    """Return the additive form of a mask, [T, S] boolean or additive."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)


def _attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attend_masked` of query heads that share key/value heads: [1, g H, T, D] and [1, g H, T]."""
    num_queries, num_tokens, size = query.shape[1:]
    folded = query.reshape(1, key.shape[1], -1, size)
    output, total = attend_masked(folded, key, value, mask, scale)
    return output.reshape(1, num_queries, num_tokens, -1), total.reshape(1, num_queries, num_tokens)
