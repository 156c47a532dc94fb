"""Attention masks of a token tree: every node sees the committed tokens, its ancestors and itself.

Letters: T tokens fed, L = `num_cached` committed tokens in the cache, at positions 0 .. L - 1, S = L + T keys.
`parents` are [T] indices among the fed tokens, each below its child's, -1 for none; `positions` are [T], absolute, on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch
from transformers import PreTrainedConfig

from lp_runtime.model.attention.mask_rows import additive_mask, ancestor_mask, compile_masks
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.attention.tree_attention import chunk_mask
from lp_runtime.utils.tensors import tensor_on

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")

LayerMasks = torch.Tensor | dict[str, torch.Tensor]


class MaskForm(Enum):
    """Form of the masks that an attention function accepts."""

    BOOLEAN = "boolean"  # [1, 1, T, S] bool, True where a token sees a key
    ADDITIVE = "additive"  # [1, 1, T, S] in the model's dtype, added to the scores
    TREE_ONLY = "tree only"  # [1, 1, T, T] additive, for the tree's own keys; BOOLEAN if a layer hides committed tokens


class MaskBuilder:
    """Builder of 4-D masks in the form that a model's attention accepts."""

    def __init__(
        self,
        config: PreTrainedConfig,
        # Name of the model's attention implementation. "sdpa" needs boolean masks. "eager" needs additive ones and
        # silently misreads boolean ones. tree_attention.py needs additive ones: on a CPU for all keys, on other devices
        # for the tree alone.
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
    ):
        compile_masks()
        self.is_own = attention == TREE  # whether the attention is that of tree_attention.py
        self.form = _form_of(attention, device)
        self._dtype, self._device = dtype, device
        window: int = getattr(config, "sliding_window", None) or 0
        chunk: int = getattr(config, "attention_chunk_size", None) or 0
        kinds = set(getattr(config, "layer_types", None) or ())
        # Whether the model accepts a dictionary of masks by kind of layer, instead of one mask.
        self.by_kind = bool(kinds - {FULL})
        self._kinds = kinds if self.by_kind else {FULL if kinds or not window else SLIDING}
        # (sliding window, chunk) of each kind of layer, in tokens; 0 for none.
        self.limits_by_kind = {
            kind: (window if kind == SLIDING else 0, chunk if kind == CHUNKED else 0) for kind in self._kinds
        }

    def build(self, parents: Sequence[int] | np.ndarray, positions: torch.Tensor, num_cached: int) -> LayerMasks:
        """Return the mask of a step in the shape that `form` defines, or one for each kind of layer by name."""
        num_keys = num_cached + len(parents)
        hiding = {kind for kind in self._kinds if self._hides(kind, num_keys)}
        from_ancestors = hiding if self.form is MaskForm.ADDITIVE else self._kinds
        masks: dict[str, torch.Tensor] = {}
        if from_ancestors:
            ancestors = tensor_on(self._device, ancestor_mask(parents))
            for kind in from_ancestors:
                if self.form is MaskForm.TREE_ONLY and kind not in hiding:
                    masks[kind] = self._to_additive(ancestors)
                else:
                    masks[kind] = self._windowed(kind, ancestors, positions, num_cached)
        if unwindowed := self._kinds - from_ancestors:
            masks |= dict.fromkeys(unwindowed, self._unwindowed(parents, num_cached))
        return masks if self.by_kind else next(iter(masks.values()))

    def build_chunk(self, positions: torch.Tensor, num_cached: int) -> LayerMasks | None:
        """Return the mask of a chunk of a prompt, or one for each kind of layer by name.

        It is `chunk_mask`, or a boolean mask, [1, 1, T, S], for layers with chunked attention that hide tokens. None if
        the model's own causal mask serves as well: where nothing is hidden, without cached tokens or for a single
        token, and with another attention than tree_attention.py's.
        """
        num_tokens = len(positions)
        hiding = {kind for kind in self._kinds if self._hides(kind, num_cached + num_tokens)}
        if not self.is_own or (not hiding and (num_cached == 0 or num_tokens == 1)):
            return None
        masks: dict[str, torch.Tensor] = {}
        for kind, (window, chunk) in self.limits_by_kind.items():
            if chunk and kind in hiding:
                ancestors = torch.ones((num_tokens, num_tokens), dtype=torch.bool, device=positions.device).tril()
                masks[kind] = self._windowed(kind, ancestors, positions, num_cached)
            else:
                masks[kind] = chunk_mask(num_tokens, positions.device, window if kind in hiding else 0)
        return masks if self.by_kind else next(iter(masks.values()))

    def _hides(self, kind: str, num_keys: int) -> bool:
        return any(0 < limit < num_keys for limit in self.limits_by_kind[kind])

    def _unwindowed(self, parents: Sequence[int] | np.ndarray, num_cached: int) -> torch.Tensor:
        """Return the additive mask, [1, 1, T, S], of layers that hide no committed token."""
        lowest = max(torch.finfo(each).min for each in (self._dtype, torch.float32))  # finite in both dtypes
        mask = tensor_on(self._device, additive_mask(parents, num_cached, lowest))
        return mask.to(self._dtype)[None, None]

    def _windowed(self, kind: str, ancestors: torch.Tensor, positions: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Return the mask, [1, 1, T, S], boolean or additive, of layers that may hide committed tokens."""
        mask = torch.cat([ancestors.new_ones((len(ancestors), num_cached)), ancestors], dim=1)
        window, chunk = self.limits_by_kind[kind]
        keys = torch.cat([torch.arange(num_cached, device=positions.device), positions])[None, :]
        queries = positions[:, None]
        if window:
            mask &= keys > queries - window
        if chunk:
            mask &= queries // chunk == keys // chunk
        return self._to_additive(mask) if self.form is MaskForm.ADDITIVE else mask[None, None]

    def _to_additive(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the additive form, [1, 1, T, columns], of a boolean mask, [T, columns]."""
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, lowest)[None, None]


def _form_of(attention: str, device: torch.device) -> MaskForm:
    if attention == "eager" or (attention == TREE and device.type == "cpu"):
        return MaskForm.ADDITIVE
    return MaskForm.TREE_ONLY if attention == TREE else MaskForm.BOOLEAN
