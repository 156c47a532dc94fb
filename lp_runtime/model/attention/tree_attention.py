"""Attention for a token tree that never repeats keys and values for grouped heads.

The queries of all heads that share a key/value head are folded into one longer row of queries. On a CPU they attend in
one call, with a mask. On a GPU a mask would rule out the fastest kernels, and most of the work needs none, because
every token of a tree sees the whole committed prefix. So attention covers the prefix without a mask and the tree's own
T x T part with one, and the two are merged by the log-sum-exp of their scores (as in split-key decoding). A chunk of a
prompt after committed tokens is handled in the same way, except that its T x T part is causal. In a sliding window a
chunk attends to the keys of the window and to its own (parts.py).

Letters: T tokens of the tree, L committed tokens, H key/value heads, g query heads for each, D head size, P sequences
of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lp_runtime.model.attention.parts import attend_after_prefix, attend_chunk, attend_masked

NAME = "lp_runtime_tree"  # as `attn_implementation` of a model


class DeviceAttention(Protocol):
    """Attention of a pass of a fixed size, whose inputs are on the device only; see DeviceCache."""

    def attend(
        self, query: torch.Tensor, num_heads: int, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend to the keys of the layer written last; return [1, T, g H, D]; see DeviceCache.attend."""


class AttentionBatch(Protocol):
    """Keys, values and masks of several sequences that are fed in one pass; implemented by BatchedCache."""

    @property
    def sizes(self) -> list[int]:
        """[P + 1] tokens fed of each sequence, then the number of padding tokens."""

    @property
    def joined(self) -> list[int] | None:
        """[P + 1] number of keys of each sequence, then of padding tokens, if a layer's `key` has those of all."""

    @property
    def states(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """[P] keys and values of each sequence in the current layer, [1, H, L + T, D] each."""

    def masks_of(self, stand_in: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the [P] masks that a layer's single mask, `stand_in`, represents."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    # Additive, in the dtype of the query: [1, 1, T, L + T], or [1, 1, T, T], of the tree alone. With `chunk_mask` the
    # tokens are a chunk of a prompt: each sees the L tokens and those before itself, or a sliding window of them. With
    # any other mask, or none, this is transformers' sdpa.
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    # Given in a pass of a fixed size, whose keys and values are already in their caches. The mask is then that of the
    # pass, and only the shapes of `key` and `value` are read.
    device_cache: DeviceAttention | None = None,
    # Keys, values and masks, if the tokens belong to several sequences. Then `key` and `value` are those of all of them
    # if the batch is `joined`; otherwise only the shape of `value` is read.
    batch: AttentionBatch | None = None,
    s_aux: torch.Tensor | None = None,  # [g H] attention sinks, see `_attend_with_sinks`
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return ([1, T, g H, D], None), like transformers: attention to committed tokens and ancestors.

    `query` is [1, g H, T, D], `key` and `value` are [1, H, L + T, D].
    """
    if batch is not None:
        return _attend_batch(module, query, key, value, attention_mask, scaling, batch, s_aux=s_aux, **kwargs), None
    num_tokens, num_keys, num_heads, size = query.shape[2], key.shape[2], key.shape[1], query.shape[3]
    groups = query.shape[1] // num_heads
    scale = size**-0.5 if scaling is None else scaling
    if device_cache is not None:
        assert attention_mask is not None
        return device_cache.attend(query, num_heads, attention_mask, scale, s_aux), None
    if s_aux is not None:
        window = kwargs.get("sliding_window")
        return _attend_with_sinks(query, key, value, attention_mask, scale, s_aux, window), None
    num_columns = 0
    if attention_mask is not None and attention_mask.dtype == query.dtype:  # an additive mask
        num_columns = attention_mask.shape[-1]
    if num_columns not in (num_tokens, num_keys):
        return _attend_prompt(module, query, key, value, attention_mask, scaling, **kwargs), None
    assert attention_mask is not None
    folded = query.reshape(1, num_heads, groups * num_tokens, size)
    if num_columns == num_keys:
        output = torch.nn.functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=_fold(attention_mask, groups), scale=scaling
        )
    else:
        output = attend_after_prefix(folded, key, value, num_tokens, scale, attention_mask[0, 0])[0].to(query.dtype)
    output = output.reshape(1, num_heads * groups, num_tokens, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


def chunk_mask(num_tokens: int, device: torch.device, window: int = 0) -> torch.Tensor:
    """Return the empty mask, [1, 1 + window, T, 0], that marks a prompt's chunk; `window` is 0 for none."""
    return torch.empty((1, 1 + window, num_tokens, 0), dtype=torch.bool, device=device)


def window_of(mask: torch.Tensor | None) -> int | None:
    """Return the sliding window of a `chunk_mask`, 0 for none; None for any other mask."""
    return mask.shape[1] - 1 if mask is not None and mask.shape[-1] == 0 else None


def _attend_prompt(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention of tokens that form no tree, [1, T, g H, D], by a fixed kernel of torch or sdpa.

    Fixed kernels are preferred because sdpa may choose one that is planned again for every number of keys, such as
    cuDNN's.
    """
    num_tokens, size = query.shape[2:]
    window = window_of(attention_mask)
    is_causal = window is not None or (attention_mask is None and num_tokens in (1, key.shape[2]))
    if is_causal and (window or size == value.shape[3]):
        scale = size**-0.5 if scaling is None else scaling
        output, _ = attend_chunk(query, key, value, scale, window or 0)
        return output.to(query.dtype).transpose(1, 2).contiguous()
    if window is not None:
        shape = (1, 1, num_tokens, key.shape[2])
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(key.shape[2] - num_tokens)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return attention with sinks (gpt-oss), [1, T, g H, D]: each head has one more score without a value.

    The output without a sink is scaled by the weight that the sink leaves to the keys: sigmoid(log-sum-exp - sink).
    `mask` is [1, 1, T, S] boolean or additive, with a sliding `window` of tokens or None; or as in `tree_attention`.
    """
    num_tokens, num_keys = query.shape[2], key.shape[2]
    if mask is not None and mask.shape[-1] == num_keys:
        first = 0 if window is None else max(0, num_keys - num_tokens - window + 1)  # no token sees earlier keys
        shown = mask[0, 0, :, first:]
        if shown.dtype == torch.bool:
            lowest = torch.finfo(torch.float32).min
            shown = torch.zeros(shown.shape, device=mask.device).masked_fill_(~shown, lowest)
        output, total = attend_masked(query, key[:, :, first:], value[:, :, first:], shown, scale)
    elif mask is None or mask.shape[-1] == 0:
        output, total = attend_chunk(query, key, value, scale, window_of(mask) or 0)
    else:
        output, *sums = attend_after_prefix(query, key, value, num_tokens, scale, mask[0, 0])
        total = torch.logaddexp(*sums)
    left = torch.sigmoid(total - sinks.float()[:, None])[..., None]  # weight left to the keys
    return (output.float() * left).to(query.dtype).transpose(1, 2).contiguous()


def _attend_batch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    batch: AttentionBatch,
    **kwargs: Any,
) -> torch.Tensor:
    """Return [1, T, g H, D]: `tree_attention` of each sequence in turn, then zeros for the padding."""
    assert attention_mask is not None
    *queries, padding = query.split(batch.sizes, 2)
    states = batch.states
    if batch.joined is not None:
        states = [*zip(key.split(batch.joined, 2), value.split(batch.joined, 2), strict=True)][:-1]
    parts = zip(queries, states, batch.masks_of(attention_mask), strict=True)
    outputs = [tree_attention(module, part, *each, mask, scaling, **kwargs)[0] for part, each, mask in parts]
    outputs.append(query.new_zeros((1, padding.shape[2], query.shape[1], value.shape[3])))
    return torch.cat(outputs, 1)


# Copies of masks for g query heads, and g. All layers of a step get the same masks; a copy is freed with its mask.
_folded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _fold(mask: torch.Tensor, groups: int) -> torch.Tensor:
    if groups == 1:
        return mask
    known = _folded.get(mask)
    if known is None or known[0] != groups:
        known = _folded[mask] = groups, mask.repeat(1, 1, groups, 1)
    return known[1]


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
