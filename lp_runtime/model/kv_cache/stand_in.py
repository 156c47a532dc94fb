"""Base classes of the caches that represent several sequences in one forward pass.

The runner always passes masks and positions, so transformers never derives them from such a cache's length.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class StandInCache(Cache):
    """Cache that represents the caches of several sequences."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (tokens fed, 0), from which transformers would make a mask if none were passed."""
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0; not used, because positions are always passed."""
        return 0


class StandInLayer(CacheLayerMixin):
    """One layer of a StandInCache."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate nothing: the layers of the sequences' caches allocate their tensors."""
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens fed, 0), as `StandInCache.get_mask_sizes` does."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0; not used, because positions are always passed."""
        return 0
