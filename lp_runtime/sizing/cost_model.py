"""The cost model: duration of a replica's forward pass by number of tokens, in nanoseconds.

Letters: R replicas, M tokens of the largest pass with a known time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.sizing.pass_times import PassTimes

# Without measurements, a step of 66 tokens is assumed to cost twice as much as a step of one token.
ASSUMED_FREE_TOKENS = 64
ASSUMED_STEP_NS = 1_000_000  # of a one-token step; only ratios of assumed times matter
PREFIX_UNIT = 1024  # committed tokens; the unit in which the cost of a longer context is given


class CostModel:
    """Expected duration of each replica's passes: measured times, corrected by the passes of steps.

    Args:
        times: [R, M + 1] int64 measured or assumed nanoseconds of a single request, for 0, 1, 2 ... tokens, M >= 1.

    Attributes:
        measured: [R, M + 1] int64 measured nanoseconds, a request's part of its batch.
        times: [R, M + 1] int64 expected nanoseconds, after corrections.
    """

    def __init__(self, times: np.ndarray, passes: PassTimes):
        self._alone, self._passes = times, passes
        self._batch_size = 1
        self.measured = times
        self.times = np.empty_like(times)
        self.update()

    def set_batch_size(self, batch_size: int) -> None:
        """Set the number of requests, >= 1, that share a forward pass; each is charged its part of the time."""
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self.measured = shared_times(self._alone, batch_size)
            self.update()

    def update(self) -> None:
        """Apply changed corrections to `times`."""
        self._passes.expect(self.measured, self.times)


def assumed_times(num_replicas: int, num_tokens: int) -> np.ndarray:
    """Return [num_replicas, num_tokens + 1] int64 nanoseconds to assume without measurements."""
    tokens = np.arange(num_tokens + 1)
    times = ASSUMED_STEP_NS * (ASSUMED_FREE_TOKENS + tokens) // (ASSUMED_FREE_TOKENS + 1)
    return np.tile(times, (num_replicas, 1))


def interpolate(tokens: Sequence[int], nanoseconds: Sequence[int], num_tokens: int, num_padded: int = 0) -> np.ndarray:
    """Return times for all numbers of tokens from times measured for some.

    If passes are padded to fixed sizes, times form a staircase: a pass takes as long as the next measured size.
    Otherwise times follow straight lines between measured points; the last line is extended. A point above a later one
    is lowered to it, so that times never fall: disturbances only make a measurement longer. Returns [num_tokens + 1]
    int64 nanoseconds for 0, 1, 2 ... tokens.

    Args:
        tokens, nanoseconds: what was measured; tokens ascending.
        num_tokens: largest number of tokens to return a time for.
        num_padded: passes of up to this many tokens are padded to the next size in `tokens`; 0 for none.
    """
    # Integers, so that all replicas compute identical times.
    known = np.minimum.accumulate(np.asarray(nanoseconds, dtype=np.int64)[::-1])[::-1]
    times = np.full(num_tokens + 1, known[0], dtype=np.int64)
    for i in range(len(tokens) - 1):
        end = tokens[i + 1] if i + 2 < len(tokens) else max(tokens[i + 1], num_tokens)
        places = np.arange(tokens[i], min(end, num_tokens) + 1)
        times[places] = known[i] + (known[i + 1] - known[i]) * (places - tokens[i]) // (tokens[i + 1] - tokens[i])
    stairs = np.arange(min(num_padded, tokens[-1], num_tokens) + 1)
    times[stairs] = known[np.searchsorted(np.asarray(tokens), stairs)]
    return times


def times_at_length(times: np.ndarray, prefix_ns: Sequence[int] | np.ndarray, num_tokens: int) -> np.ndarray:
    """Return step times, [M + 1] int64 ns, for a context `num_tokens` longer than when they were measured.

    `prefix_ns`, [2], are what PREFIX_UNIT more committed tokens add to a step of one token, and to each further token.
    """
    more = np.maximum(np.arange(len(times)) - 1, 0) * int(prefix_ns[1]) + int(prefix_ns[0])
    return times + more * num_tokens // PREFIX_UNIT


def shared_times(times: np.ndarray, batch_size: int) -> np.ndarray:
    """Return one request's part, [R, M + 1] int64 ns, of passes that feed `batch_size` equal requests.

    `times`, [R, M + 1] int64 nanoseconds, are those of a single request.
    """
    places = np.arange(times.shape[1]) * batch_size
    known = np.minimum(places, times.shape[1] - 1)
    slopes = times[:, -1:] - times[:, -2:-1] if times.shape[1] > 1 else 0
    return np.ascontiguousarray((times[:, known] + (places - known) * slopes) // batch_size)
