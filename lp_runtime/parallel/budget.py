"""How many tokens a step is worth, and how long each replica will take: measured curves, kept up to date as steps go.

What one replica alone knows, its time, travels in the exchange as an integer and counts from the next step on, so all
replicas decide alike. Times are in nanoseconds.

Letters: T nodes in the tree, R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.parallel.partition import Share, finishing_time, largest_fit, partition_by_times

# Where nothing was measured: memory-bound up to about so many tokens, then in proportion.
ASSUMED_FREE_TOKENS = 64
ASSUMED_NANOSECONDS = 1_000_000
SCALE_ONE = 1 << 10
EQUAL_WITHIN = 15 * SCALE_ONE // 100  # replicas whose scales differ by less are taken for equal
SMOOTHING = 8  # steps
REST_AFTER = 4  # steps in a row that were worth the root alone, before drafting rests
LONGEST_REST = 32  # steps
REACH_BITS = 40
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def assumed_times(num_replicas: int, num_tokens: int) -> np.ndarray:
    """[R, num_tokens + 1] curves where nothing was measured."""
    tokens = np.arange(num_tokens + 1)
    curve = ASSUMED_NANOSECONDS * (ASSUMED_FREE_TOKENS + tokens) // (ASSUMED_FREE_TOKENS + 1)
    return np.tile(curve, (num_replicas, 1))


def interpolate(tokens: Sequence[int], nanoseconds: Sequence[int], num_tokens: int) -> np.ndarray:
    """[num_tokens + 1] a curve that does not fall, through measured points; behind the last two it goes on straight."""
    known = np.maximum.accumulate(np.asarray(nanoseconds, dtype=np.float64))
    curve = np.interp(np.arange(num_tokens + 1), tokens, known)
    if len(tokens) > 1 and num_tokens > tokens[-1]:
        slope = (known[-1] - known[-2]) / (tokens[-1] - tokens[-2])
        curve[tokens[-1] :] = known[-1] + slope * np.arange(num_tokens + 1 - tokens[-1])
    return curve.astype(np.int64)


class StepBudget:
    """Decides, before a step, how many nodes of a tree to feed, and who feeds which.

    Args:
        times: [R, M + 1] how long each replica takes for so many tokens.
        is_auto: whether to feed what pays, else whatever the tree has.
        budget: tokens that a replica feeds at most; None for no limit.
        plain_factor: by how much more a step of drafting must promise than one of the root alone, of SCALE_ONE.
    """

    def __init__(
        self, times: np.ndarray, is_auto: bool, budget: int | None, plain_factor: int = SCALE_ONE * 103 // 100
    ):
        self._curves = times
        self._times = times
        self._is_auto = is_auto
        self.limit = budget
        self._plain_factor = plain_factor
        self._scales = np.full(len(times), SCALE_ONE, dtype=np.int64)
        self._overhead = 0
        self._num_plain = 0  # steps in a row that were worth the root alone
        self._rest = 0

    @property
    def is_resting(self) -> bool:
        """Whether the next step is to feed the root alone, unasked: lately nothing paid."""
        return self._rest > 0

    def fit(self, tree: TokenTree, reach: np.ndarray) -> int:
        """How many of a tree's first nodes to feed.

        Args:
            tree: its nodes in the order of `reach`.
            reach: [T] estimated probability that a node is on the accepted path, fixed point of REACH_BITS.
        """
        num_replicas = len(self._times)
        limit = self._times.shape[1] - 1
        limit = limit if self.limit is None else min(limit, self.limit)
        most = largest_fit(tree, num_replicas, limit)
        if not self._is_auto:
            return most
        num_pending = tree.root + 1
        # Expected tokens of a step with the first n nodes; 22 bits leave room for the division below.
        expected = np.cumsum(reach[tree.root : most]) >> (REACH_BITS - 22)
        if num_replicas == 1:
            times = self._times[0, num_pending : most + 1]
            sizes = np.arange(num_pending, most + 1)
        else:
            sizes = np.array(sorted({min(most, tree.root + step * num_replicas) for step in GRID} | {num_pending}))
            sizes = sizes[sizes >= num_pending]
            times = np.array([finishing_time(tree, size, self._times) for size in sizes])
            expected = expected[sizes - num_pending]
        rates = (expected << 32) // (times + self._overhead)
        best = int(np.argmax(rates))
        if rates[best] * SCALE_ONE < rates[0] * self._plain_factor:
            best = 0
        self._num_plain = self._num_plain + 1 if best == 0 else 0
        if self._num_plain >= REST_AFTER:
            self._rest = min(1 << (self._num_plain - REST_AFTER + 1), LONGEST_REST)
        return int(sizes[best])

    def shares(self, tree: TokenTree) -> list[Share]:
        """The tree's shares, such that the last replica is done as soon as can be."""
        return partition_by_times(tree, self._times)

    def observe(self, shares: Sequence[Share], forward: Sequence[int], overhead: Sequence[int]) -> None:
        """Learn from a step.

        Args:
            shares: [R] the step's.
            forward: [R] nanoseconds that each replica's forward pass took; 0 where it is not known.
            overhead: [R] nanoseconds of what else a step takes.
        """
        if len(shares) == 1 and not self._is_auto:
            return
        self._rest = max(0, self._rest - 1)
        known = max(overhead)
        self._overhead += (known - self._overhead) // SMOOTHING if self._overhead else known
        if min(forward) <= 0:
            return
        sizes = [min(len(share.nodes), self._curves.shape[1] - 1) for share in shares]
        expected = self._curves[np.arange(len(sizes)), sizes]
        ratios = np.minimum(np.array(forward, dtype=np.int64) * SCALE_ONE // np.maximum(expected, 1), SCALE_ONE << 10)
        self._scales += (ratios - self._scales) // SMOOTHING
        scales = np.maximum(self._scales, 1)
        if scales.max() * SCALE_ONE <= scales.min() * (SCALE_ONE + EQUAL_WITHIN):
            scales = np.full_like(scales, scales.mean().astype(np.int64))
        self._times = self._curves * scales[:, None] // SCALE_ONE
