"""The attention mask of a token tree: every node sees the committed tokens, its ancestors and itself.

Letters: T tokens fed, L committed tokens in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

LayerMasks = torch.Tensor | dict[str, torch.Tensor]


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """[T, T] bool: row i is True at i and at its ancestors. `parents` [T]: parents before children, -1 for none."""
    num_tokens = len(parents)
    mask = np.zeros((num_tokens, num_tokens), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


class MaskBuilder:
    """Makes 4-D masks in the form that a model's attention wants.

    Args:
        config: the model's (text) configuration.
        attention: "sdpa" takes boolean masks; "eager" additive ones (a boolean one it would silently misread).
        dtype, device: of the model.
    """

    def __init__(self, config, attention: str, dtype: torch.dtype, device: torch.device):
        self._additive = attention == "eager"
        self._dtype, self._device = dtype, device
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None)
        # Layer types that share a model get a mask each, by name; a model of one kind of layer gets one mask.
        if layer_types and "sliding_attention" in layer_types:
            self._windows = {kind: window if kind == "sliding_attention" else None for kind in set(layer_types)}
            self._by_type = True
        else:
            self._windows = {"full_attention": None if layer_types else window}
            self._by_type = False

    @property
    def longest_window(self) -> int:
        """The longest sliding window of any layer; 0 without one."""
        return max(window or 0 for window in self._windows.values())

    def build(self, parents: Sequence[int], positions: torch.Tensor, num_cached: int) -> LayerMasks:
        """The masks of a step: [1, 1, T, L + T] each.

        Args:
            parents: [T] index of each token's parent among those fed, -1 for the first.
            positions: [T] absolute positions, on the device.
            num_cached: L; the cached tokens stand at positions 0 .. L - 1.
        """
        num_tokens = len(parents)
        full = torch.ones((num_tokens, num_cached + num_tokens), dtype=torch.bool)
        full[:, num_cached:] = torch.from_numpy(ancestor_mask(parents))
        full = full.to(self._device, non_blocking=True)
        masks = {kind: self._finish(full, positions, num_cached, window) for kind, window in self._windows.items()}
        return masks if self._by_type else masks["full_attention"]

    def _finish(self, full: torch.Tensor, positions: torch.Tensor, num_cached: int, window: int | None) -> torch.Tensor:
        if window is not None:
            key_positions = torch.cat([torch.arange(num_cached, device=positions.device), positions])
            full = full & (positions[:, None] - key_positions[None, :] < window)
        if self._additive:
            lowest = torch.finfo(self._dtype).min
            full = torch.zeros(full.shape, dtype=self._dtype, device=full.device).masked_fill_(~full, lowest)
        return full[None, None]
