"""Corrections of path probabilities, learned from which nodes were accepted.

A drafter's path probability estimates how likely a node is on the accepted path: that part of a token is expected.
Those of one token are right on average, those of long paths are not: in trees of 24 tokens, nodes of a real model were
accepted 0.64 to 0.85 times as often as estimated, nodes of a model that repeats itself 1.0 to 1.45 times. So path
probabilities are corrected by level, with counts that are carried across requests.

All arithmetic is on integers, so equal inputs give equal corrections on every replica.

Letters: T nodes in the tree, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.utils.jit import compiled, inlined

EXPECTED_BITS = 22  # fixed point of expected tokens: 512 tokens fit into 31 bits
CORRECTION_BITS = 10  # fixed point of corrections
# Assumed accepted tokens per expected token, by level: one level for each halving of the path probability, the last one
# for all below. Those of unlikely nodes are high so that they are tried: sizes are better than with 1 for all levels.
STARTING_CORRECTIONS = (0.9, 0.95, 1.2, 1.4, 1.6, 2.0, 2.0, 2.5, 3.0, 3.0)
INITIAL_TOKENS = 4  # expected tokens per level that the starting corrections count for
MEMORY_TOKENS = 64  # a level's counts are halved when its expected tokens exceed this
MAX_DISCOUNT = 4  # path probabilities are divided by at most this: else no tree would ever be tried again
RECOVERY_FITS = 16  # each tree that does not pay forgives 1/16 of the shortfall of accepted tokens


class AcceptanceCalibration:
    """Corrects path probabilities by acceptance counts; carried from one request to the next of its kind.

    Attributes:
        drafted: [L] int64 sum of recent path probabilities, fixed point of EXPECTED_BITS.
        kept: [L] int64 accepted tokens among the same nodes, fixed point of EXPECTED_BITS.
    """

    def __init__(self) -> None:
        one = 1 << EXPECTED_BITS
        self.drafted = np.full(len(STARTING_CORRECTIONS), INITIAL_TOKENS * one, np.int64)
        self.kept = np.array([int(INITIAL_TOKENS * one * each) for each in STARTING_CORRECTIONS], np.int64)

    def corrected(self, path_probabilities: np.ndarray) -> np.ndarray:
        """Return corrected path probabilities, int64 [T] of EXPECTED_BITS, from [T] of PATH_PROBABILITY_BITS."""
        expected = np.empty(len(path_probabilities), np.int64)
        _correct_all(path_probabilities, self.kept, self.drafted, expected)
        return expected

    def observe(self, path_probabilities: np.ndarray, num_pending: int, accepted: Sequence[int]) -> None:
        """Learn from the [T] nodes that a step fed; the first `num_pending`, the pending tokens, do not count."""
        _observe(path_probabilities, num_pending, np.array(accepted, np.int64), self.kept, self.drafted)

    def restore(self) -> None:
        """Move the corrections back towards 1, so that drafting is retried after trees that did not pay."""
        self.kept += np.maximum(0, self.drafted - self.kept) // RECOVERY_FITS


@inlined
def _level_of(of_node, num_levels):
    """Return the level of a path probability that is fixed point of EXPECTED_BITS."""
    level, threshold = 0, np.int64(1) << (EXPECTED_BITS - 1)
    while level < num_levels - 1 and of_node < threshold:
        threshold >>= 1
        level += 1
    return level


@inlined
def correct(path_probability, kept, drafted):
    """Return a path probability, fixed point of PATH_PROBABILITY_BITS, corrected and of EXPECTED_BITS."""
    of_node = path_probability >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
    level = _level_of(of_node, len(kept))
    correction = (kept[level] << CORRECTION_BITS) // drafted[level]
    return min(of_node * correction >> CORRECTION_BITS, np.int64(1) << EXPECTED_BITS)


@compiled
def _correct_all(path_probabilities, kept, drafted, expected):
    for node in range(len(path_probabilities)):
        expected[node] = correct(path_probabilities[node], kept, drafted)


@compiled
def _observe(path_probabilities, num_pending, accepted, kept, drafted):
    for node in range(num_pending, len(path_probabilities)):
        of_node = path_probabilities[node] >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
        drafted[_level_of(of_node, len(kept))] += of_node
    for i in range(len(accepted)):
        of_node = path_probabilities[accepted[i]] >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
        kept[_level_of(of_node, len(kept))] += np.int64(1) << EXPECTED_BITS
    for level in range(len(kept)):
        if drafted[level] > np.int64(MEMORY_TOKENS) << EXPECTED_BITS:
            drafted[level] //= 2
            kept[level] //= 2
        kept[level] = max(kept[level], drafted[level] // MAX_DISCOUNT)
