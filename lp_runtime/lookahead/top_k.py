"""Layout of a node's top-k candidates, its likeliest successors, in the exchange and in tables.

A token's margin is how far its log-probability lies below the likeliest token's, in sixteenths of a nat. On the wire a
candidate has 32 bits, its token id above MARGIN_BITS bits of margin, and two candidates are one integer
(sampling/packing.py). In memory the candidates of a node are an entry.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lp_runtime.utils.jit import Int, compiled

K = 8  # candidates of an entry: as many as token recycling's tree uses
ENTRY = 16  # int32 of an entry, one cache line: K ids, K margins of a byte each, stamp, origin; the rest is unused
MARGINS, STAMP = K, K + K // 4  # columns of an entry: its first margins; its stamp
ORIGIN = STAMP + 1  # column of the pass that computed an entry's candidates:
FROM_STEP, FROM_PROMPT = 0, 1  # a step, or the prefill
ID_BITS, MARGIN_BITS = 24, 8  # of a candidate on the wire
UNITS_PER_NAT = 16  # margins and noise are integers, sixteenths of a nat
MAX_MARGIN = 255  # fits a byte; 16 nats below the likeliest token, differences no longer matter


class VocabularyPrior(NamedTuple):
    """A model's predictions after one token and after two, without a text. Unknown rows have no candidates.

    Attributes:
        after_token: [V, ENTRY] int32 entries after each token; V may be 0.
        after_pair: [P * K, ENTRY] int32 entries after each of the first P tokens and each of its K likeliest
            successors, which are the candidates in `after_token`.
    """

    after_token: np.ndarray
    after_pair: np.ndarray


@compiled
def margin_of(entries: np.ndarray, row: Int, rank: Int) -> Int:
    """Return the margin of an entry's candidate by rank."""
    return np.int64((entries[row, MARGINS + (rank >> 2)] >> (8 * (rank & 3))) & 255)
