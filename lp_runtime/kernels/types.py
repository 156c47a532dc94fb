"""Arguments of the sampling kernel; separate from it, so that importing them does not need Triton.

Letters: n nodes, K top-k candidates of a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Noise(NamedTuple):
    """Gumbel noise of one sample.

    Attributes:
        seed: 0 to 2**64 - 1.
        sample: 0 to 2**32 - 1.
        positions: [n] int64, absolute positions of the tokens to be sampled, below 2**32.
    """

    seed: int
    sample: int
    positions: torch.Tensor


class Packing(NamedTuple):
    """Format in which the sampling kernel packs its results; see lp_runtime/sampling/sampler.py.

    Attributes:
        num: K; 0 for no candidates.
        width: integers per row, at least 1 + K / 2; unused ones are 0.
        no_token: token id to pack if there are fewer than K tokens.
        margin_unit: units per nat of a margin.
        max_margin: largest margin, in units.
    """

    num: int
    width: int
    no_token: int
    margin_unit: int
    max_margin: int
