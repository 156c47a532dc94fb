"""What caches have in common that stand for those of several sequences in one forward pass.

Masks and positions are always given, so transformers has none to derive from such a cache's length.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class StandInCache(Cache):
    """Stands for the caches of several sequences."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (tokens fed, 0): what transformers would make a mask of, if none were given."""
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given."""
        return 0


class StandInLayer(CacheLayerMixin):
    """Stands for one layer of the caches of several sequences."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate nothing: each sequence's own layer does."""
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens fed, 0), as `StandInCache.get_mask_sizes`."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given."""
        return 0
