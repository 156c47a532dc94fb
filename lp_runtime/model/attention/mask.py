"""The attention mask of a token tree: every node sees the committed tokens, its ancestors and itself.

Letters: T tokens fed, L committed tokens in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.utils.jit import compiled, with_fresh_cache
from lp_runtime.utils.tensors import tensor_on

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")
ALIBI_MODELS = ("bloom", "mpt")
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "window_size")

LayerMasks = torch.Tensor | dict[str, torch.Tensor]


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """[T, T] bool: row i is True at i and at its ancestors. `parents` [T]: parents before children, -1 for none."""
    mask = np.empty((len(parents), len(parents)), dtype=np.bool_)
    _mark_ancestors(np.array(parents, dtype=np.int64), mask)
    return mask


@functools.cache
def compile_masks() -> None:
    """Compile, or load from where it is kept, what is compiled here. Once a process."""
    with_fresh_cache(lambda: (ancestor_mask([-1, 0]), added_mask([-1, 0], 1, -1.0)))


@compiled
def _mark_ancestors(parents, mask):
    """The same, of [T] int64 into a given [T, T] bool."""
    for node in range(len(parents)):
        parent = parents[node]
        for other in range(parent + 1):
            mask[node, other] = mask[parent, other]
        for other in range(parent + 1, len(parents)):
            mask[node, other] = False
        mask[node, node] = True


def added_mask(parents: Sequence[int], num_cached: int, lowest: float) -> np.ndarray:
    """[T, L + T] float32, what is added to scores: `lowest` where `ancestor_mask` behind L columns of True is False."""
    mask = np.empty((len(parents), num_cached + len(parents)), dtype=np.float32)
    _mark_hidden(np.asarray(parents, dtype=np.int64), num_cached, lowest, mask)
    return mask


@compiled
def _mark_hidden(parents, num_cached, lowest, mask):
    """The same, of [T] int64 into a given [T, L + T]."""
    for node in range(len(parents)):
        parent, behind = parents[node], num_cached + parents[node] + 1
        for place in range(num_cached):
            mask[node, place] = 0
        for place in range(num_cached, behind):
            mask[node, place] = mask[parent, place]
        for place in range(behind, mask.shape[1]):
            mask[node, place] = lowest
        mask[node, num_cached + node] = 0


class MaskBuilder:
    """Makes 4-D masks in the form that a model's attention wants.

    Args:
        config: the model's (text) configuration.
        attention: "sdpa" takes boolean masks; "eager" additive ones (a boolean one it would silently misread);
            that of tree_attention.py additive ones, and but on a CPU of the tree alone where it can be.
        dtype, device: of the model.

    Attributes:
        windows: lengths of the sliding windows and chunks that layers may have.
        by_kind: whether the model takes a mask for each kind of layer, by name, and not one for all.
        is_own: whether the attention is that of tree_attention.py.
        windows_by_kind: the sliding window of each kind of layer; 0 without one.

    Raises:
        ModelError: if the model has a kind of layer that cannot be fed a tree.
    """

    def __init__(self, config, attention: str, dtype: torch.dtype, device: torch.device):
        compile_masks()
        on_cpu = device.type == "cpu"
        self.is_own = attention == TREE
        self._additive = attention == "eager" or (attention == TREE and on_cpu)
        self._only_tree = attention == TREE and not on_cpu
        self._dtype, self._device = dtype, device
        self._sliding_window: int | None = getattr(config, "sliding_window", None)
        self._chunk: int | None = getattr(config, "attention_chunk_size", None)
        kinds = set(getattr(config, "layer_types", None) or ())
        if unknown := kinds - set(KINDS):
            raise ModelError(
                f"{config.model_type}: layers of type {min(unknown)} cannot be fed a token tree: they carry a state"
                " from token to token, or mix neighbours, whatever the mask says"
            )
        if getattr(config, "alibi", False) or getattr(config, "model_type", None) in ALIBI_MODELS:
            raise ModelError(
                f"{config.model_type}: cannot be fed a token tree: its position biases (ALiBi) go by a token's place"
                " in the input, not by its position"
            )
        # A model of several kinds of layers takes a mask for each, by name; a model of one kind takes one mask.
        self.by_kind = bool(kinds - {FULL})
        self._kinds = kinds if self.by_kind else {FULL if kinds or not self._sliding_window else SLIDING}
        self.windows_by_kind = {kind: (self._sliding_window or 0) if kind == SLIDING else 0 for kind in self._kinds}
        # Every name under which a model keeps a length beyond which it attends otherwise, used here or not.
        self.windows: list[int] = [length for name in WINDOW_FIELDS if (length := getattr(config, name, None))]

    def build(self, parents: Sequence[int], positions: torch.Tensor, num_cached: int) -> LayerMasks:
        """The masks of a step: [1, 1, T, L + T] each, or as tree_attention.py has them.

        Args:
            parents: [T] index of each token's parent among those fed, -1 for the first.
            positions: [T] absolute positions, on the device.
            num_cached: L; the cached tokens stand at positions 0 .. L - 1.
        """
        num_keys = num_cached + len(parents)
        masks = {}
        if not self._additive or self.hides(num_keys):
            ancestors = tensor_on(self._device, ancestor_mask(parents))
        if self._additive and not all(self._hides(kind, num_keys) for kind in self._kinds):
            lowest = max(torch.finfo(each).min for each in (self._dtype, torch.float32))
            seen = tensor_on(self._device, added_mask(parents, num_cached, lowest)).to(self._dtype)[None, None]
        for kind in self._kinds:
            hides = self._hides(kind, num_keys)
            if self._only_tree and not hides:
                masks[kind] = self._add(ancestors)
            elif self._additive and not hides:
                masks[kind] = seen
            else:
                masks[kind] = self._finish(ancestors, positions, num_cached, kind)
        return masks if self.by_kind else next(iter(masks.values()))

    def hides(self, num_keys: int) -> bool:
        """Whether any layer may hide committed tokens from some token, with so many keys."""
        return any(self._hides(kind, num_keys) for kind in self._kinds)

    def _hides(self, kind: str, num_keys: int) -> bool:
        """Whether a kind of layer may hide committed tokens from some token, with so many keys."""
        return kind != FULL and num_keys > (self._sliding_window if kind == SLIDING else self._chunk)

    def _finish(self, ancestors: torch.Tensor, positions: torch.Tensor, num_cached: int, kind: str) -> torch.Tensor:
        full = torch.cat([ancestors.new_ones((len(ancestors), num_cached)), ancestors], dim=1)
        if kind != FULL:
            keys = torch.cat([torch.arange(num_cached, device=positions.device), positions])[None, :]
            queries = positions[:, None]
            if kind == SLIDING:
                full = full & (queries - keys < self._sliding_window)
            else:
                full = full & (queries // self._chunk == keys // self._chunk)
        return self._add(full) if self._additive else full[None, None]

    def _add(self, mask: torch.Tensor) -> torch.Tensor:
        """A boolean mask, [T, S], as what is added to scores, [1, 1, T, S]."""
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, lowest)[None, None]
