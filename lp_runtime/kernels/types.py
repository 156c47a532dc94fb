"""Arguments of the sampling kernel; separate from it, so that importing them does not need Triton.

Letters: n nodes, K top-k candidates of a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Noise(NamedTuple):
    """Gumbel noise of one sample."""

    seed: int  # 0 to 2**64 - 1
    sample: int  # 0 to 2**32 - 1
    positions: torch.Tensor  # [n] int64, absolute positions of the tokens to be sampled, below 2**32


class Packing(NamedTuple):
    """Format in which the sampling kernel packs its results; see lp_runtime/sampling/sampler.py."""

    num: int  # K; 0 for no candidates
    width: int  # integers per row, at least 1 + K / 2; unused ones are 0
    no_token: int  # token id to pack if there are fewer than K tokens
    margin_unit: int  # units per nat of a margin
    max_margin: int  # largest margin, in units
