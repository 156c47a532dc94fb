"""Attention for exactness=strict: a token's result is bit for bit independent of what else is fed.

In half precision the shape of a forward pass changes rounding: other kernels are chosen, sums are taken in another
order, and near-ties flip. Two measures prevent that. Every pass feeds the same number of tokens (forward/passes.py), so
matrix products always have the same shape. And attention works on blocks of absolute positions, in an order that
depends on a token's position p alone:

    head   blocks 0 .. p // BLOCK - 2: committed long ago, one matrix product a block for all tokens of the pass
    tail   the last two blocks up to position p: keys gathered for each token, from the cache and from its ancestors
    sums   over the keys of a block; over blocks by adjacent pairs, so blocks beyond a token's own add exact zeros

Scores, weights and sums are float32.

Letters: T tokens fed, B tokens of a pass, S keys written, H key/value heads, g query heads for each, D head size, n
blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.tree_attention import DeviceAttention
from lp_runtime.utils.jit import bound, compiled, compiles

NAME = "lp_runtime_strict"  # as `attn_implementation` of a model
BLOCK = 64  # positions
TAIL = 2 * BLOCK  # positions
MAX_DEPTH = BLOCK  # tokens of a path after the committed ones: all uncommitted keys are then in the tail
POSITION, WINDOW, KEYS = 0, 1, 2  # columns of the table: position, sliding window (0: none), then TAIL cache indices


def tail_table(num_cached: int, parents: Sequence[int] | np.ndarray, window: int) -> np.ndarray:
    """Return what each token attends to, [T, KEYS + TAIL] int64, in the form of `strict_attention`'s mask.

    Fed token i is written at num_cached + i of the cache. `parents` are as in mask.py; `window` is 0 for none.
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
        keys = np.arange(first, position + 1)
        new = max(0, num_cached - first)
        keys[new:] = path[len(path) - (len(keys) - new) :] if new < len(keys) else []
        table[token, KEYS + first - start : KEYS + position + 1 - start] = keys
    return table


def path_table(num_cached: int, parents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return L and the cache indices of the keys on each token's path, [T, 1 + BLOCK] int64.

    Column 0 is L = `num_cached`, and column 1 + i is for position L + i; columns beyond the token's position are 0. Fed
    token i is written at L + i of the cache. `parents` and `positions` are [T] int64, as in `MaskBuilder.build`.
    """
    assert len(positions) == 0 or int(positions.max()) < num_cached + MAX_DEPTH
    table = np.zeros((len(parents), 1 + BLOCK), dtype=np.int64)
    _path_kernel()(num_cached, parents, positions, table)
    return table


@functools.cache
def _path_kernel() -> Callable:
    integers = np.zeros(1, np.int64)
    return bound(_fill_paths, 0, integers, integers, np.zeros((1, 1), np.int64))


@compiles
def compile_paths() -> None:
    _path_kernel()


@compiled
def _fill_paths(num_cached, parents, positions, table):
    for token in range(len(parents)):
        depth, parent = positions[token] - num_cached, parents[token]
        table[token, 0] = num_cached
        for column in range(1, depth + 1):
            table[token, column] = table[parent, column]
        table[token, 1 + depth] = num_cached + token


class _Queries(NamedTuple):
    """Queries of a pass, [H, g, B, D] float32 and scaled, and the limits of what they see."""

    states: torch.Tensor
    positions: torch.Tensor  # [B] int64
    windows: torch.Tensor  # [B] int64, sliding window of each token; 0 for none
    softcap: float | None  # scores are squashed to +-softcap, if given

    @property
    def tail_start(self) -> torch.Tensor:
        """[B] position at which each token's tail begins; negative in the first block."""
        return (self.positions // BLOCK - 1) * BLOCK

    def cap(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def in_window(self, key_positions: torch.Tensor) -> torch.Tensor:
        """Return which key positions, [B, ...], are inside each token's sliding window, [B, ...] bool."""
        windows = self.windows.view(-1, *[1] * (key_positions.dim() - 1))
        return (windows == 0) | (self.positions.view_as(windows) - key_positions < windows)


def strict_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,  # [1, 1, B, KEYS + TAIL] int64, from `tail_table`
    scaling: float | None = None,
    softcap: float | None = None,
    # [g H] attention sinks, one more score of each head in the softmax's sum; None for none.
    s_aux: torch.Tensor | None = None,
    # Given in a pass of a fixed size, whose keys and values are already in their caches. The mask is then that of the
    # pass, and only the shape of `key` is read.
    device_cache: DeviceAttention | None = None,
    **kwargs: object,  # of other attention functions, ignored: the mask contains what they would say
) -> tuple[torch.Tensor, None]:
    """Return ([1, B, g H, D], None), like transformers: attention by blocks of absolute positions.

    `query` is [1, g H, B, D], `key` and `value` are [1, H, S, D].
    """
    num_tokens, num_heads = query.shape[2], key.shape[1]
    groups = query.shape[1] // num_heads
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if device_cache is not None:
        if softcap is not None:
            raise ModelError(f"softcap={softcap:g}: not supported by the kernels of passes of fixed sizes")
        return device_cache.attend(query, num_heads, attention_mask, scale, s_aux), None
    table = attention_mask[0, 0]
    states = (query[0].float() * scale).view(num_heads, groups, num_tokens, -1)
    queries = _Queries(states, table[:, POSITION], table[:, WINDOW], softcap)

    tail_scores, tail_values = _tail(queries, key[0], value[0], table[:, KEYS:])
    peak = tail_scores.amax(-1, keepdim=True)  # [H, g, B, 1]
    num_blocks = key.shape[2] // BLOCK
    if num_blocks:
        head_scores, head_values = _head(queries, key[0], value[0], num_blocks)
        peak = torch.maximum(peak, head_scores.amax(-1).amax(1)[..., None])
    if s_aux is not None:  # a sink is one more score, without a value
        peak = torch.maximum(peak, s_aux.float().view(num_heads, groups, 1, 1))

    weights = torch.exp(tail_scores - peak)
    total = weights.sum(-1)  # [H, g, B]
    if s_aux is not None:
        total = total + torch.exp(s_aux.float().view(num_heads, groups, 1) - peak[..., 0])
    output = torch.matmul(weights.transpose(1, 2), tail_values).transpose(1, 2)  # [H, g, B, D]
    if num_blocks:
        weights = torch.exp(head_scores - peak[:, None])
        total = total + _sum_of_pairs(weights.sum(-1))
        summed = torch.matmul(weights.flatten(2, 3), head_values).unflatten(2, (groups, num_tokens))
        output = output + _sum_of_pairs(summed)
    output = (output / total[..., None]).flatten(0, 1)  # [g H, B, D]
    return output.transpose(0, 1)[None].to(query.dtype), None


def _tail(
    queries: _Queries, keys: torch.Tensor, values: torch.Tensor, key_indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather and score each token's last two blocks, whose keys' cache indices are [B, TAIL], -1 for none.

    Returns scores, [H, g, B, TAIL], and values, [H, B, TAIL, D], float32.
    """
    positions = queries.tail_start[:, None] + torch.arange(TAIL, device=key_indices.device)
    allowed = (key_indices >= 0) & queries.in_window(positions)
    key_indices = key_indices.clamp_min(0)
    tail_keys, tail_values = keys[:, key_indices].float(), values[:, key_indices].float()
    scores = queries.cap(torch.matmul(queries.states.transpose(1, 2), tail_keys.transpose(2, 3)))  # [H, B, g, TAIL]
    scores = scores.masked_fill(~allowed[None, :, None], torch.finfo(torch.float32).min)
    return scores.transpose(1, 2), tail_values


def _head(
    queries: _Queries, keys: torch.Tensor, values: torch.Tensor, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the n blocks before each token's tail; they are committed for every token that may see them.

    Returns scores, [H, n, g, B, BLOCK], and values, [H, n, BLOCK, D], float32.
    """
    groups, num_tokens = queries.states.shape[1:3]
    head_keys = keys[:, : num_blocks * BLOCK].float().unflatten(1, (num_blocks, BLOCK))  # [H, n, BLOCK, D]
    head_values = values[:, : num_blocks * BLOCK].float().unflatten(1, (num_blocks, BLOCK))
    flat = queries.states.flatten(1, 2)[:, None].expand(-1, num_blocks, -1, -1)  # [H, n, g B, D]
    scores = queries.cap(torch.matmul(flat, head_keys.transpose(2, 3)))
    scores = scores.unflatten(2, (groups, num_tokens))  # [H, n, g, B, BLOCK]
    positions = torch.arange(num_blocks * BLOCK, device=keys.device).expand(num_tokens, -1)
    allowed = (positions < queries.tail_start[:, None]) & queries.in_window(positions)  # [B, n BLOCK]
    allowed = allowed.unflatten(1, (num_blocks, BLOCK)).transpose(0, 1)  # [n, B, BLOCK]
    return scores.masked_fill(~allowed[None, :, None], torch.finfo(torch.float32).min), head_values


def _sum_of_pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over dimension 1 by adjacent pairs: zeros after the last summand change no bit."""
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]


AttentionInterface.register(NAME, strict_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
