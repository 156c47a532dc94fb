"""What the sampling kernel is told; it needs no Triton to say so.

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
        positions: [n] int64 absolute positions of the tokens to be sampled, below 2**32.
    """

    seed: int
    sample: int
    positions: torch.Tensor


class Packing(NamedTuple):
    """How results are packed; see lp_runtime/sampling/sampler.py.

    Attributes:
        num: K, 0 for no candidates.
        width: integers of a row, at least 1 + K / 2; those without candidates are 0.
        no_token: packed where there are fewer than K tokens.
        margin_unit: units of a margin in a nat.
        max_margin: the largest margin.
    """

    num: int
    width: int
    no_token: int
    margin_unit: int
    max_margin: int
