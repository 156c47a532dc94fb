"""What path probabilities promise, and what became of it.

A drafter's path probability says how likely a node is on the accepted path. Low ones are too low as a rule: on texts of
two models, nodes at 1 in 200 were accepted more than three times as often. High ones are a little too high on some
texts: on a real model's, nodes above a half were accepted 0.9 times as often. So promises are corrected by their level,
with what was counted of the level, in requests before, too.

Everything is integer arithmetic, so equal inputs give equal corrections on every replica.

Letters: T nodes in the tree, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.utils.jit import compiled, inlined

EXPECTED_BITS = 22  # fixed point of expected tokens: 512 of them fit into 31 bits
CORRECTION_BITS = 10  # fixed point of corrections
# Accepted tokens for each that was promised, by level: one for each halving of the path probability, and one for all
# below. Counted at 24 tokens a step on 21 prompts of SmolLM2-135M-Instruct and 26 of the demo model.
STARTING_CORRECTIONS = (0.9, 0.95, 1.2, 1.4, 1.6, 2.0, 2.0, 2.5, 3.0, 3.0)
INITIAL_TOKENS = 4  # promised ones of each level, that count as observed before the first step
MEMORY_TOKENS = 64  # promised ones of a level, from which on older ones count half
MAX_DISCOUNT = 4  # promises are divided by at most this: else nothing would be tried again
RECOVERY_FITS = 16  # a tree that does not pay makes up for one part in so many of the promises that were not kept


class Promises:
    """Corrects path probabilities by what steps have shown of them; carried from one request to the next of its kind.

    Attributes:
        promised: [L] int64 accepted tokens that were promised lately, fixed point of EXPECTED_BITS.
        kept: [L] int64 accepted tokens that there were, fixed point of EXPECTED_BITS.
    """

    def __init__(self) -> None:
        one = 1 << EXPECTED_BITS
        self.promised = np.full(len(STARTING_CORRECTIONS), INITIAL_TOKENS * one, np.int64)
        self.kept = np.array([int(INITIAL_TOKENS * one * each) for each in STARTING_CORRECTIONS], np.int64)

    def corrected(self, path_probabilities: np.ndarray) -> np.ndarray:
        """Return how many tokens are expected of each node.

        Args:
            path_probabilities: [T] int64 as the drafter estimates them, fixed point of PATH_PROBABILITY_BITS.

        Returns:
            [T] int64 probability that each node is on the accepted path, fixed point of EXPECTED_BITS.
        """
        expected = np.empty(len(path_probabilities), np.int64)
        _correct_all(path_probabilities, self.kept, self.promised, expected)
        return expected

    def observe(self, path_probabilities: np.ndarray, num_pending: int, accepted: Sequence[int]) -> None:
        """Learn from the nodes that a step has fed.

        Args:
            path_probabilities: [T] int64 of these nodes, fixed point of PATH_PROBABILITY_BITS.
            num_pending: pending tokens among them, the first ones, which promise nothing.
            accepted: the nodes on the accepted path.
        """
        _observe(path_probabilities, num_pending, np.array(accepted, np.int64), self.kept, self.promised)

    def restore(self) -> None:
        """Believe promises a little more: a tree that is not fed keeps none, and would never be fed again."""
        self.kept += np.maximum(0, self.promised - self.kept) // RECOVERY_FITS


@inlined
def _level_of(of_node, num_levels):
    """Return the level of a path probability.

    Args:
        of_node: path probability, fixed point of EXPECTED_BITS.
        num_levels: L.
    """
    level, threshold = 0, np.int64(1) << (EXPECTED_BITS - 1)
    while level < num_levels - 1 and of_node < threshold:
        threshold >>= 1
        level += 1
    return level


@inlined
def correct(path_probability, kept, promised):
    """Return how many tokens are expected of a node, fixed point of EXPECTED_BITS.

    Args:
        path_probability: fixed point of PATH_PROBABILITY_BITS.
        kept: [L] see Promises.
        promised: [L] see Promises.
    """
    of_node = path_probability >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
    level = _level_of(of_node, len(kept))
    correction = (kept[level] << CORRECTION_BITS) // promised[level]
    return min(of_node * correction >> CORRECTION_BITS, np.int64(1) << EXPECTED_BITS)


@compiled
def _correct_all(path_probabilities, kept, promised, expected):
    """Write `expected`; see `Promises.corrected`."""
    for node in range(len(path_probabilities)):
        expected[node] = correct(path_probabilities[node], kept, promised)


@compiled
def _observe(path_probabilities, num_pending, accepted, kept, promised):
    """Count promises and what was kept of them; see `Promises.observe`."""
    for node in range(num_pending, len(path_probabilities)):
        of_node = path_probabilities[node] >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
        promised[_level_of(of_node, len(kept))] += of_node
    for i in range(len(accepted)):
        of_node = path_probabilities[accepted[i]] >> (PATH_PROBABILITY_BITS - EXPECTED_BITS)
        kept[_level_of(of_node, len(kept))] += np.int64(1) << EXPECTED_BITS
    for level in range(len(kept)):
        if promised[level] > np.int64(MEMORY_TOKENS) << EXPECTED_BITS:
            promised[level] //= 2
            kept[level] //= 2
        kept[level] = max(kept[level], promised[level] // MAX_DISCOUNT)
