"""Arguments of the sampling kernel; separate from it, so that importing them does not need Triton.

Letters: n nodes, K top-k candidates of a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lp_runtime.lookahead.top_k import ID_BITS

if TYPE_CHECKING:
    import torch

NO_TOKEN = (1 << ID_BITS) - 1  # token id packed for missing candidates of a node with fewer than K


class Noise(NamedTuple):
    """Gumbel noise of one sample."""

    seed: int  # 0 to 2**64 - 1
    sample: int  # 0 to 2**32 - 1
    positions: torch.Tensor  # [n] int64, absolute positions of the tokens to be sampled, below 2**32


class Packing(NamedTuple):
    """Format in which the sampling kernel packs its results; see lp_runtime/sampling/sampler.py."""

    num: int  # K; 0 for no candidates
    width: int  # integers per row, at least 1 + K / 2; unused ones are 0
