"""Attention for a token tree, in which keys and values are never repeated.

The queries of all heads that share a key/value head are folded into one longer row of queries. On a CPU they attend in
one call, with a mask. On a GPU a mask would turn the fastest kernels off, and none is needed for most of the work:
every token of a tree sees the whole committed prefix. So attention goes over the prefix without a mask, over the
tree's own T x T part with one, and the two are merged by the log-sum-exp of their scores (as in split-key decoding).
A chunk of a prompt behind committed tokens is attended to likewise, its own part causally.

Letters: T tokens of the tree, L committed tokens, H key/value heads, g query heads for each, D head size, P sequences
of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lp_runtime.model.attention.parts import attend, attend_masked, merge
from lp_runtime.model.attention.sinks import attend_with_sinks

NAME = "lp_runtime_tree"  # as `attn_implementation` of a model


class DeviceAttention(Protocol):
    """Attention in a pass of a fixed size, whose inputs are on the device alone; DeviceCache has it."""

    def attend(
        self, query: torch.Tensor, num_heads: int, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend to the keys of the layer that wrote last.

        Args:
            query: [1, g H, T, D].
            num_heads: H.
            mask: what the pass gives the model as its mask.
            scale: factor of the scores.
            sinks: [g H] attention sinks; None for none.

        Returns:
            [1, T, g H, D]
        """


class AttentionBatch(Protocol):
    """What attention must know of several sequences that are fed in one pass; BatchedCache is one."""

    @property
    def sizes(self) -> list[int]:
        """[P + 1] tokens fed of each sequence, and the padding behind them."""

    @property
    def states(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """[P] keys and values of each sequence in the present layer, [1, H, L + T, D] each."""

    def masks_of(self, stand_in: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the [P] masks that one mask of a layer stands for.

        Args:
            stand_in: the mask that the layer was given.
        """


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    device_cache: DeviceAttention | None = None,
    batch: AttentionBatch | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to committed tokens and ancestors; an attention function of transformers' interface.

    Args:
        module: the model's attention block.
        query: [1, g H, T, D].
        key: [1, H, L + T, D].
        value: [1, H, L + T, D].
        attention_mask: additive, in the dtype of the query: [1, 1, T, L + T], or [1, 1, T, T], of the tree alone. With
            `chunk_mask`, [1, 1, T, 0], the tokens are a chunk of a prompt: each sees the L tokens and those before
            itself. With any other mask, or without one, this is transformers' sdpa.
        scaling: of the scores; default 1 / sqrt(D).
        device_cache: given in a pass of a fixed size, whose keys and values have been written into their caches. The
            mask is the pass's own then, and of `key` and `value` the shapes are read only.
        batch: keys, values and masks of several sequences, if the tokens are of several; `key` is not read then, and of
            `value` its shape only.
        s_aux: [g H] attention sinks (sinks.py), of models that have them; None for none.
        **kwargs: of transformers' sdpa.

    Returns:
        ([1, T, g H, D], None)
    """
    if batch is not None:
        return _attend_batch(module, query, value, attention_mask, scaling, batch, s_aux=s_aux, **kwargs), None
    num_tokens, num_keys, num_heads, size = query.shape[2], key.shape[2], key.shape[1], query.shape[3]
    groups = query.shape[1] // num_heads
    scale = size**-0.5 if scaling is None else scaling
    if device_cache is not None:
        assert attention_mask is not None
        return device_cache.attend(query, num_heads, attention_mask, scale, s_aux), None
    if s_aux is not None:
        window = kwargs.get("sliding_window")
        return attend_with_sinks(query, key, value, attention_mask, scale, s_aux, window), None
    num_columns = _num_columns(attention_mask, query.dtype)
    if num_columns not in (num_tokens, num_keys):
        return _attend_prompt(module, query, key, value, attention_mask, scaling, **kwargs), None
    assert attention_mask is not None
    folded = query.reshape(1, num_heads, groups * num_tokens, size)
    if num_columns == num_keys:
        output = torch.nn.functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=_fold(attention_mask, groups), scale=scaling
        )
    else:
        output = attend_apart(folded, key, value, attention_mask[0, 0], scale)
    output = output.reshape(1, num_heads * groups, num_tokens, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


def chunk_mask(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the mask, [1, 1, T, 0], that stands for a chunk of a prompt behind committed tokens."""
    return torch.empty((1, 1, num_tokens, 0), dtype=torch.bool, device=device)


def is_chunk_mask(mask: torch.Tensor | None) -> bool:
    """Whether a mask is `chunk_mask`."""
    return mask is not None and mask.shape[-1] == 0


def _attend_prompt(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention of what is no tree, [1, T, g H, D]: by a named kernel of torch's, or by transformers' sdpa.

    What torch chooses for sdpa may be a kernel that is planned anew for every number of keys, as cuDNN's are.

    Arguments are those of `tree_attention`.
    """
    num_tokens, size = query.shape[2:]
    scale = size**-0.5 if scaling is None else scaling
    is_prompt = attention_mask is None and num_tokens in (1, key.shape[2])
    if is_prompt and size == value.shape[3]:
        return attend(query, key, value, scale, is_causal=num_tokens > 1)[0].transpose(1, 2).contiguous()
    if is_chunk_mask(attention_mask):
        if size == value.shape[3]:
            return attend_chunk(query, key, value, scale)
        shape = (1, 1, num_tokens, key.shape[2])
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(key.shape[2] - num_tokens)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]


def attend_chunk(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend to the committed prefix without a mask and to the chunk causally, and merge the two.

    Args:
        query: [1, g H, T, D].
        key: [1, H, L + T, D].
        value: [1, H, L + T, D].
        scale: factor of the scores.

    Returns:
        [1, T, g H, D], contiguous.
    """
    num_cached = key.shape[2] - query.shape[2]
    prefix = attend(query, key[:, :, :num_cached], value[:, :, :num_cached], scale)
    own = attend(query, key[:, :, num_cached:], value[:, :, num_cached:], scale, is_causal=True)
    return merge(*prefix, own[0].float(), own[1]).to(query.dtype).transpose(1, 2).contiguous()


def _num_columns(mask: torch.Tensor | None, dtype: torch.dtype) -> int:
    """Return the number of keys that a mask is of; 0 if it is no additive mask in a dtype."""
    return mask.shape[-1] if mask is not None and mask.dtype == dtype else 0


def _attend_batch(
    module: torch.nn.Module,
    query: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    batch: AttentionBatch,
    **kwargs: Any,
) -> torch.Tensor:
    """Return `tree_attention` of each sequence of a batch and zeros for the padding, one behind the other.

    Arguments are those of `tree_attention`. The result is [1, T, g H, D], with the tokens of all sequences and padding.
    """
    assert attention_mask is not None
    *queries, padding = query.split(batch.sizes, 2)
    parts = zip(queries, batch.states, batch.masks_of(attention_mask), strict=True)
    outputs = [tree_attention(module, part, *states, mask, scaling, **kwargs)[0] for part, states, mask in parts]
    outputs.append(query.new_zeros((1, padding.shape[2], query.shape[1], value.shape[3])))
    return torch.cat(outputs, 1)


@functools.lru_cache(maxsize=16)  # by identity: all layers of a step are given the same masks
def _fold(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a mask with its rows repeated g times, [1, 1, g T, S]."""
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def attend_apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend to the committed prefix without a mask and to the tree with one, and merge the two.

    Args:
        query: [1, H, g T, D].
        key: [1, H, L + T, D].
        value: [1, H, L + T, D].
        mask: [T, T] additive.
        scale: factor of the scores.

    Returns:
        [1, H, g T, D]
    """
    num_cached = key.shape[2] - len(mask)
    prefix = attend(query, key[:, :, :num_cached], value[:, :, :num_cached], scale)
    tree = attend_masked(query, key[:, :, num_cached:], value[:, :, num_cached:], mask, scale)
    return merge(*prefix, *tree).to(query.dtype)


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
