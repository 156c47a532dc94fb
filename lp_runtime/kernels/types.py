"""Arguments of the kernels; separate from them, so that importing them does not need Triton.

Letters: n nodes, K top-k candidates of a node; R dimensions of a head that rotary embedding rotates; X experts.
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


class Rotation(NamedTuple):
    """Pairs that rotary embedding makes of the first R dimensions of a head; the others are not rotated.

    Attributes:
        are_neighbors: whether dimensions 2i and 2i + 1 are a pair (GLM, Cohere); otherwise i and i + R / 2 are.
        angle_step: of neighbours, columns of cosines and sines from one pair to the next: 1, or 2 if each dimension has
            its own column.
        is_halved: whether there are R / 2 columns of cosines and sines (gpt-oss); otherwise R.
    """

    are_neighbors: bool = False
    angle_step: int = 1
    is_halved: bool = False

    def num_columns(self, num_rotated: int) -> int:
        return num_rotated // 2 if self.is_halved else num_rotated

    def num_rotated(self, cos: torch.Tensor) -> int:
        """Return R, given the cosines, [1, T, columns]."""
        return cos.shape[-1] * (2 if self.is_halved else 1)


class Routing(NamedTuple):
    """The rule by which a mixture's router chooses the experts of a token.

    Attributes:
        num_chosen: experts of a token.
        scores: what an expert's output is multiplied by: its probability among all experts ("softmax") or among those
            that are chosen ("softmax of chosen"), or the sigmoid of its logit ("sigmoid").
        normalizes: whether scores are divided by their sum over the chosen experts; not for "softmax of chosen".
        scale: what scores are multiplied by at the end.
        num_groups: groups of equal size that experts are in; 1 for no groups.
        num_kept: groups whose experts can be chosen: those with the largest sums of their two best scores.
    """

    num_chosen: int
    scores: str = "softmax"
    normalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_kept: int = 1
