"""The attention mask of a token tree: every node sees the committed tokens, its ancestors and itself.

Letters: T tokens fed, L committed tokens in the cache, S = L + T keys.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import Enum

import numpy as np
import torch
from transformers import PreTrainedConfig

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.attention.tree_attention import chunk_mask
from lp_runtime.utils.jit import compiled, compiles
from lp_runtime.utils.tensors import tensor_on

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")
STATEFUL = ("linear_attention", "hybrid", "hybrid_sliding", "recurrent")  # kinds of layers

LayerMasks = torch.Tensor | dict[str, torch.Tensor]


class MaskForm(Enum):
    """The form in which an attention function takes masks.

    Attributes:
        BOOLEAN: [1, 1, T, S] bool, True where a token sees a key.
        ADDITIVE: [1, 1, T, S] in the model's dtype, added to the scores.
        TREE_ONLY: [1, 1, T, T] additive, for the tree's own keys; BOOLEAN where a layer hides committed tokens.
    """

    BOOLEAN = "boolean"
    ADDITIVE = "additive"
    TREE_ONLY = "tree only"


def ancestor_mask(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return [T, T] bool: row i is True at i and at the ancestors of i.

    Args:
        parents: [T] index of each node's parent, -1 for none; parents stand before children.
    """
    mask = np.empty((len(parents), len(parents)), dtype=np.bool_)
    _mark_ancestors(np.array(parents, dtype=np.int64), mask)
    return mask


@compiles
def compile_masks() -> None:
    """Compile this module's kernels, or load them from disk."""
    ancestor_mask([-1, 0])
    additive_mask([-1, 0], 1, -1.0)


@compiled
def _mark_ancestors(parents, mask):
    """Write `ancestor_mask` of parents, [T] int64, into a mask, [T, T] bool."""
    for node in range(len(parents)):
        parent = parents[node]
        for other in range(parent + 1):
            mask[node, other] = mask[parent, other]
        for other in range(parent + 1, len(parents)):
            mask[node, other] = False
        mask[node, node] = True


def additive_mask(parents: Sequence[int] | np.ndarray, num_cached: int, lowest: float) -> np.ndarray:
    """Return [T, S] float32, added to scores: 0 at committed tokens, at ancestors and at the node, else `lowest`.

    Args:
        parents: [T] index of each node's parent, -1 for none; parents stand before children.
        num_cached: L.
        lowest: the value that hides a key.
    """
    mask = np.empty((len(parents), num_cached + len(parents)), dtype=np.float32)
    _mark_hidden(np.asarray(parents, dtype=np.int64), num_cached, lowest, mask)
    return mask


@compiled
def _mark_hidden(parents, num_cached, lowest, mask):
    """Write `additive_mask` of parents, [T] int64, into a mask, [T, S] float32."""
    for node in range(len(parents)):
        parent, behind = parents[node], num_cached + parents[node] + 1
        for column in range(num_cached):
            mask[node, column] = 0
        for column in range(num_cached, behind):
            mask[node, column] = mask[parent, column]
        for column in range(behind, mask.shape[1]):
            mask[node, column] = lowest
        mask[node, num_cached + node] = 0


class MaskBuilder:
    """Makes 4-D masks in the form that a model's attention takes.

    Args:
        config: the model's (text) configuration.
        attention: name of the model's attention implementation. "sdpa" takes boolean masks. "eager" takes additive ones
            and would silently misread a boolean one. tree_attention.py takes additive ones: on a CPU of all keys, on
            other devices of the tree alone.
        dtype: the model's.
        device: the model's.
        kinds: kinds of layers; None for those that the configuration names, which are checked.

    Attributes:
        form: the form of the masks.
        by_kind: whether the model takes a mask for each kind of layer, by name, and not one for all.
        is_own: whether the attention is that of tree_attention.py.
        windows_by_kind: sliding window of each kind of layer, in tokens; 0 without one.
        limits_by_kind: (sliding window, chunk) of each kind of layer, in tokens; 0 without one.

    Raises:
        ModelError: if the model has a kind of layer that cannot be fed a token tree.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        kinds: Set[str] | None = None,
    ):
        compile_masks()
        self.is_own = attention == TREE
        self.form = _form_of(attention, device)
        self._dtype, self._device = dtype, device
        self._sliding_window: int = getattr(config, "sliding_window", None) or 0
        self._chunk: int = getattr(config, "attention_chunk_size", None) or 0
        kinds = layer_kinds(config) if kinds is None else kinds
        # A model of several kinds of layers takes a mask for each, by name; a model of one kind takes one mask.
        self.by_kind = bool(kinds - {FULL})
        self._kinds = kinds if self.by_kind else {FULL if kinds or not self._sliding_window else SLIDING}
        self.windows_by_kind = {kind: self._sliding_window if kind == SLIDING else 0 for kind in self._kinds}
        self.limits_by_kind = {
            kind: (window, self._chunk if kind == CHUNKED else 0) for kind, window in self.windows_by_kind.items()
        }

    def build(self, parents: Sequence[int] | np.ndarray, positions: torch.Tensor, num_cached: int) -> LayerMasks:
        """Return the mask of a step, or one for each kind of layer by name, in the shape that `form` says.

        Args:
            parents: [T] index of each token's parent among those fed, -1 for the first.
            positions: [T] absolute positions, on the device.
            num_cached: L; the cached tokens stand at positions 0 .. L - 1.
        """
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

        Args:
            positions: [T] absolute positions, on the device, one behind the other.
            num_cached: L.

        Returns:
            tree_attention.py's mask of a chunk, and a boolean one, [1, 1, T, S], where a layer hides committed tokens;
            None where the model's own causal mask is as fast.
        """
        num_tokens = len(positions)
        if not self.is_own or num_cached == 0 or num_tokens == 1:
            return None
        masks: dict[str, torch.Tensor] = {}
        for kind in self._kinds:
            if self._hides(kind, num_cached + num_tokens):
                ancestors = torch.ones((num_tokens, num_tokens), dtype=torch.bool, device=positions.device).tril()
                masks[kind] = self._windowed(kind, ancestors, positions, num_cached)
            else:
                masks[kind] = chunk_mask(num_tokens, positions.device)
        return masks if self.by_kind else next(iter(masks.values()))

    def _hides(self, kind: str, num_keys: int) -> bool:
        """Whether a kind of layer may hide committed tokens from some token, with `num_keys` keys."""
        return kind != FULL and num_keys > (self._sliding_window if kind == SLIDING else self._chunk)

    def _unwindowed(self, parents: Sequence[int] | np.ndarray, num_cached: int) -> torch.Tensor:
        """Return the additive mask, [1, 1, T, S], of layers that hide no committed token."""
        lowest = max(torch.finfo(each).min for each in (self._dtype, torch.float32))
        mask = tensor_on(self._device, additive_mask(parents, num_cached, lowest))
        return mask.to(self._dtype)[None, None]

    def _windowed(self, kind: str, ancestors: torch.Tensor, positions: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Return the mask, [1, 1, T, S], boolean or additive, of layers that may hide committed tokens.

        Args:
            kind: of the layers.
            ancestors: [T, T] bool.
            positions: [T].
            num_cached: L.
        """
        mask = torch.cat([ancestors.new_ones((len(ancestors), num_cached)), ancestors], dim=1)
        if kind != FULL:
            keys = torch.cat([torch.arange(num_cached, device=positions.device), positions])[None, :]
            queries = positions[:, None]
            if kind == SLIDING:
                mask = mask & (queries - keys < self._sliding_window)
            else:
                mask = mask & (queries // self._chunk == keys // self._chunk)
        return self._to_additive(mask) if self.form is MaskForm.ADDITIVE else mask[None, None]

    def _to_additive(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the additive form, [1, 1, T, columns], of a boolean mask, [T, columns]."""
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, lowest)[None, None]


def _form_of(attention: str, device: torch.device) -> MaskForm:
    """Return the form of masks that an attention implementation takes on a device."""
    if attention == "eager" or (attention == TREE and device.type == "cpu"):
        return MaskForm.ADDITIVE
    return MaskForm.TREE_ONLY if attention == TREE else MaskForm.BOOLEAN


def carries_state(kind: str) -> bool:
    """Whether layers of a kind carry a state from token to token."""
    return kind in STATEFUL or "conv" in kind or "mamba" in kind


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers that a configuration names; empty if it names none.

    Args:
        config: the model's (text) configuration.

    Raises:
        ModelError: if a layer cannot be fed a token tree.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - set(KINDS):
        kind = min(unknown)
        why = (
            "carry a state from token to token, or mix neighbours, whatever the mask says"
            if carries_state(kind)
            else "are not known to depend on positions and the mask alone"
        )
        raise ModelError(f"{config.model_type}: layers of type {kind} cannot be fed a token tree: they {why}")
    return kinds
