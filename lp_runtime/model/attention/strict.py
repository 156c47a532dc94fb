"""Attention whose result for a token does not depend on how its text was fed: bit for bit, in any dtype.

In half precision the shape of a forward pass changes rounding: other kernels are chosen, sums are taken in another
order, and near-ties flip. Two things take that away. Every pass feeds the same number of tokens (strict_passes.py), so
matrix products always have the same shape. And attention goes by blocks of absolute positions, in an order that is a
function of a token's position alone:

    head   blocks 0 .. p // BLOCK - 2: committed long ago, one matrix product a block for all tokens of the pass
    tail   the last two blocks up to position p: keys gathered for each token, from the cache and from its ancestors
    sums   over the keys of a block; over blocks by adjacent pairs, so blocks beyond a token's own add exact zeros

Scores, weights and sums are float32.

Letters: B tokens of a pass, S keys written, H key/value heads, g query heads for each, D head size, n blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lp_runtime.errors import ModelError

NAME = "lp_runtime_strict"
BLOCK = 64
TAIL = 2 * BLOCK
MAX_DEPTH = BLOCK  # tokens behind the committed ones that a token may stand at: all before them are in the head or tail
POSITION, WINDOW, KEYS = 0, 1, 2  # columns of the table: position, sliding window (0: none), then TAIL places of keys


def tail_table(num_cached: int, parents: Sequence[int], window: int) -> np.ndarray:
    """[T, KEYS + TAIL] int64: what each token fed attends to, in the form that `strict_attention` takes as its mask.

    Args:
        num_cached: committed tokens, at places 0 .. num_cached - 1 of the cache; token i fed is at num_cached + i.
        parents: [T] place among those fed of each token's parent, -1 for the first.
        window: sliding window of the layers; 0 without one.
    """
    table = np.full((len(parents), KEYS + TAIL), -1, dtype=np.int64)
    table[:, WINDOW] = window
    paths: list[list[int]] = []
    for token, parent in enumerate(parents):
        path = [*(paths[parent] if parent >= 0 else ()), num_cached + token]
        paths.append(path)
        position = num_cached + len(path) - 1
        assert len(path) <= MAX_DEPTH
        table[token, POSITION] = position
        start = (position // BLOCK - 1) * BLOCK  # negative for the first block
        first = max(0, start)
        places = np.arange(first, position + 1)
        new = max(0, num_cached - first)
        places[new:] = path[len(path) - (len(places) - new) :] if new < len(places) else []
        table[token, KEYS + first - start : KEYS + position + 1 - start] = places
    return table


def strict_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface.

    Args:
        query: [1, g H, B, D].
        key, value: [1, H, S, D].
        attention_mask: [1, 1, B, KEYS + TAIL] int64, of `tail_table`.
        scaling: of the scores; default 1 / sqrt(D).
        softcap: scores are squashed to +-softcap, if given.
        kwargs: of other attention functions; a mask says what they would.

    Returns:
        ([1, B, g H, D], None)
    """
    if kwargs.get("s_aux") is not None:
        raise ModelError("attention sinks cannot be computed with exactness=strict")
    table = attention_mask[0, 0]
    num_tokens, num_heads = query.shape[2], key.shape[1]
    groups = query.shape[1] // num_heads
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = (query[0].float() * scale).view(num_heads, groups, num_tokens, -1)  # [H, g, B, D]
    keys, values = key[0], value[0]
    positions, window = table[:, POSITION], table[:, WINDOW]
    lowest = torch.finfo(torch.float32).min

    def capped(scores: torch.Tensor) -> torch.Tensor:
        return scores if softcap is None else torch.tanh(scores / softcap) * softcap

    def seen(at: torch.Tensor) -> torch.Tensor:
        """Of [B, ...] positions, those inside each token's sliding window."""
        width = window.view(-1, *[1] * (at.dim() - 1))
        return (width == 0) | (positions.view_as(width) - at < width)

    # Tail: [H, B, TAIL, D], a gather a token.
    places = table[:, KEYS:]
    start = (positions // BLOCK - 1) * BLOCK
    tail_positions = start[:, None] + torch.arange(TAIL, device=table.device)
    allowed = (places >= 0) & seen(tail_positions)
    places = places.clamp_min(0)
    tail_keys, tail_values = keys[:, places].float(), values[:, places].float()
    tail_scores = capped(torch.matmul(queries.transpose(1, 2), tail_keys.transpose(2, 3)))  # [H, B, g, TAIL]
    tail_scores = tail_scores.masked_fill(~allowed[None, :, None], lowest).transpose(1, 2)  # [H, g, B, TAIL]
    peak = tail_scores.amax(-1, keepdim=True)

    # Head: blocks that are committed for every token that may see them.
    num_blocks = keys.shape[1] // BLOCK
    if num_blocks:
        head_keys = keys[:, : num_blocks * BLOCK].float().unflatten(1, (num_blocks, BLOCK))  # [H, n, BLOCK, D]
        head_values = values[:, : num_blocks * BLOCK].float().unflatten(1, (num_blocks, BLOCK))
        flat = queries.flatten(1, 2)[:, None].expand(-1, num_blocks, -1, -1)  # [H, n, g B, D]
        head_scores = capped(torch.matmul(flat, head_keys.transpose(2, 3)))
        head_scores = head_scores.unflatten(2, (groups, num_tokens))  # [H, n, g, B, BLOCK]
        at = torch.arange(num_blocks * BLOCK, device=table.device).expand(num_tokens, -1)
        allowed = (at < start[:, None]) & seen(at)  # [B, n BLOCK]
        allowed = allowed.unflatten(1, (num_blocks, BLOCK)).transpose(0, 1)  # [n, B, BLOCK]
        head_scores = head_scores.masked_fill(~allowed[None, :, None], lowest)
        peak = torch.maximum(peak, head_scores.amax(-1).amax(1)[..., None])

    weights = torch.exp(tail_scores - peak)
    total = weights.sum(-1)  # [H, g, B]
    output = torch.matmul(weights.transpose(1, 2), tail_values).transpose(1, 2)  # [H, g, B, D]
    if num_blocks:
        weights = torch.exp(head_scores - peak[:, None])
        total = total + _sum_of_pairs(weights.sum(-1))
        summed = torch.matmul(weights.flatten(2, 3), head_values).unflatten(2, (groups, num_tokens))
        output = output + _sum_of_pairs(summed)
    output = (output / total[..., None]).flatten(0, 1)  # [g H, B, D]
    return output.transpose(0, 1)[None].to(query.dtype), None


def _sum_of_pairs(values: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 by adjacent pairs: zeros behind the last summand that counts change no bit."""
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]


AttentionInterface.register(NAME, strict_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
