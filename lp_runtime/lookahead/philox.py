"""Constants of Philox4x32-10, the counter-based random number generator of the sampling noise.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Two implementations use them and compute equal
numbers: the sampler, for whole rows of the vocabulary in tensors, and the best-first drafter, for single tokens in
compiled integer arithmetic.

A uniform number in (0, 1) is made of two words of the generator: the concatenated upper UNIFORM_HALF_BITS of each, plus
a half, times UNIFORM_UNIT.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after each round
NUM_ROUNDS = 10
WORD_BITS = 32
WORD_MASK = (1 << WORD_BITS) - 1
UNIFORM_HALF_BITS = 26  # twice this fits the mantissa of a float64 exactly
UNIFORM_UNIT = 2.0 ** (-2 * UNIFORM_HALF_BITS)
