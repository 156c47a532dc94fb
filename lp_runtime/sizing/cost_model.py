"""The cost model: how long a replica's forward pass takes, by the number of tokens that it feeds, in nanoseconds.

Letters: R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.sizing.pass_times import PassTimes

# Where nothing was measured, a step of 66 tokens is taken to cost twice what one of a single token costs.
ASSUMED_FREE_TOKENS = 64
ASSUMED_STEP_NS = 1_000_000  # of a step of one token; all times are relative to it then
PREFIX_UNIT = 1024  # committed tokens, whose cost is measured in nanoseconds


class CostModel:
    """How long each replica's forward pass takes: measured times of a request in a batch, corrected by what steps took.

    Args:
        times: [R, M + 1] int64 measured or assumed nanoseconds of a request alone, for 0, 1, 2 ... tokens, M >= 1.
        passes: What steps have shown of each replica.

    Attributes:
        measured: [R, M + 1] int64 measured nanoseconds, a request's part of the batch that it is decoded in.
        times: [R, M + 1] int64 nanoseconds that passes are expected to take.
    """

    def __init__(self, times: np.ndarray, passes: PassTimes):
        self._alone, self._passes = times, passes
        self._batch_size = 1
        self.measured = times
        self.times = np.empty_like(times)
        self.update()

    def set_batch_size(self, batch_size: int) -> None:
        """Set how many requests share a forward pass from now on; each answers for its part of the time.

        Args:
            batch_size: Number of requests, >= 1.
        """
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self.measured = shared_times(self._alone, batch_size)
            self.update()

    def update(self) -> None:
        """Compute `times` anew, after a step has shown more."""
        self._passes.expect(self.measured, self.times)


def assumed_times(num_replicas: int, num_tokens: int) -> np.ndarray:
    """Return times to assume where nothing was measured.

    Args:
        num_replicas: R.
        num_tokens: Largest number of tokens to give a time for.

    Returns:
        [R, num_tokens + 1] int64 nanoseconds for 0, 1, 2 ... tokens.
    """
    tokens = np.arange(num_tokens + 1)
    times = ASSUMED_STEP_NS * (ASSUMED_FREE_TOKENS + tokens) // (ASSUMED_FREE_TOKENS + 1)
    return np.tile(times, (num_replicas, 1))


def interpolate(tokens: Sequence[int], nanoseconds: Sequence[int], num_tokens: int, num_padded: int = 0) -> np.ndarray:
    """Return times for every number of tokens, from times that were measured for some.

    Where passes are padded to fixed sizes, times are a staircase: a pass takes what the next measured size takes.
    Elsewhere times follow a straight line between two measured points, and behind the last two. A point above a later
    one is lowered to it, so that times never fall: what disturbs a measurement makes it longer.

    Args:
        tokens: Numbers of tokens that were measured, ascending.
        nanoseconds: Measured time for each.
        num_tokens: Largest number of tokens to give a time for.
        num_padded: Up to so many tokens passes are padded, to the next of `tokens`; 0 for none.

    Returns:
        [num_tokens + 1] int64 nanoseconds for 0, 1, 2 ... tokens.
    """
    # In integers, so that all replicas have the same times to the last bit.
    known = np.minimum.accumulate(np.asarray(nanoseconds, dtype=np.int64)[::-1])[::-1]
    times = np.full(num_tokens + 1, known[0], dtype=np.int64)
    for i in range(len(tokens) - 1):
        end = tokens[i + 1] if i + 2 < len(tokens) else max(tokens[i + 1], num_tokens)
        places = np.arange(tokens[i], min(end, num_tokens) + 1)
        times[places] = known[i] + (known[i + 1] - known[i]) * (places - tokens[i]) // (tokens[i + 1] - tokens[i])
    stairs = np.arange(min(num_padded, tokens[-1], num_tokens) + 1)
    times[stairs] = known[np.searchsorted(np.asarray(tokens), stairs)]
    return times


def times_behind(times: np.ndarray, prefix_ns: Sequence[int] | np.ndarray, num_tokens: int) -> np.ndarray:
    """Return times of steps behind a longer text than that behind which they were measured.

    Args:
        times: [M + 1] int64 nanoseconds of 0, 1, 2 ... tokens.
        prefix_ns: [2] nanoseconds that PREFIX_UNIT more committed tokens add to a step of one token, and to each
            further token.
        num_tokens: how many more tokens are committed.

    Returns:
        [M + 1] int64 nanoseconds.
    """
    more = np.maximum(np.arange(len(times)) - 1, 0) * int(prefix_ns[1]) + int(prefix_ns[0])
    return times + more * num_tokens // PREFIX_UNIT


def shared_times(times: np.ndarray, batch_size: int) -> np.ndarray:
    """Return a request's part of the time of forward passes that feed several requests of equally many tokens.

    Args:
        times: [R, M + 1] int64 nanoseconds of a request alone.
        batch_size: Number of requests, >= 1.

    Returns:
        [R, M + 1] int64 nanoseconds.
    """
    places = np.arange(times.shape[1]) * batch_size
    known = np.minimum(places, times.shape[1] - 1)
    slopes = times[:, -1:] - times[:, -2:-1] if times.shape[1] > 1 else 0
    return np.ascontiguousarray((times[:, known] + (places - known) * slopes) // batch_size)
