"""Correction of measured forward-pass times: per replica a line, fitted to the passes of steps that draft.

A machine that becomes slower does not slow all sizes by one factor. If other processes use the memory, a pass of one
token takes longer and one of sixteen does not; if they use the cores, both do. The best step size depends on it.

Times are relative to the measured time of one token, so what was learned with one context holds for others. All
arithmetic is on integers that all replicas share.

Letters: R replicas, M tokens of the largest pass with a known time.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.utils.jit import compiled

FIXED_POINT_ONE = 1 << 10  # 1.0 of ratios of times, and of times of a node: all replicas must compute equal integers
EQUAL_SPREAD = 15 * FIXED_POINT_ONE // 100  # a smaller difference between replicas counts as noise
SMOOTHING_STEPS = 8  # of the mean that a line passes through
MEMORY_STEPS = 32  # approximate number of steps that the slope is fitted to
# Weight of the prior, a line through zero (one factor for all sizes): a sum of squared differences of measured times.
ASSUMED_WEIGHT = FIXED_POINT_ONE * FIXED_POINT_ONE // 4
MAX_SLOPE_RATIO = 2  # between a slope and that of the line through zero, either way
MAX_OUTLIER = 2  # a time is clipped to this multiple of the expected one: a single pass may have been disturbed
MAX_TIME = FIXED_POINT_ONE << 8  # so that products stay within 64 bits
MEAN_BITS = 10  # fixed point of the means that slopes are fitted to
# Columns of a replica's means: measured and real time that the line passes through; then measured and real time,
# squares and products that its slope is fitted to, and their number.
MEASURED, REAL, FITTED_MEASURED, FITTED_REAL, SQUARES, PRODUCTS, NUM_STEPS, NUM_COLUMNS = range(8)


class PassTimes:
    """Lines from measured to real pass times; carried from one request to the next of its kind.

    Attributes:
        slopes: [R] int64 real time per measured time, fixed point of FIXED_POINT_ONE.
        offsets: [R] int64 constant real time, in units of the measured time of one token, fixed point of
            FIXED_POINT_ONE.
    """

    def __init__(self, num_replicas: int):
        self.slopes = np.full(num_replicas, FIXED_POINT_ONE, np.int64)
        self.offsets = np.zeros(num_replicas, np.int64)
        self._means = np.zeros((num_replicas, NUM_COLUMNS), np.int64)
        self._means[:, [MEASURED, REAL]] = FIXED_POINT_ONE

    @property
    def num_steps(self) -> int:
        """Number of steps that the lines were fitted to, up to MEMORY_STEPS."""
        return int(self._means[0, NUM_STEPS])

    def observe(self, measured: np.ndarray, sizes: np.ndarray, nanoseconds: np.ndarray) -> None:
        """Learn from a step: the [R] int64 `nanoseconds` in which the replicas fed `sizes`, [R], tokens.

        `measured` are [R, M + 1] int64 nanoseconds of 0, 1, 2 ... tokens, M >= 1.
        """
        _observe(measured, sizes, nanoseconds, self._means, self.slopes, self.offsets)

    def expect(self, measured: np.ndarray, times: np.ndarray) -> None:
        """Write expected nanoseconds to `times` from `measured` ones, both [R, M + 1] int64.

        Replicas that are about equally fast get the same correction.
        """
        _expect(measured, self._means, self.slopes, self.offsets, times)


@compiled
def _observe(measured, sizes, nanoseconds, means, slopes, offsets):
    for rank in range(len(sizes)):
        unit = max(measured[rank, 1], 1)
        x = min(measured[rank, sizes[rank]] * FIXED_POINT_ONE // unit, MAX_TIME)
        y = min(nanoseconds[rank] * FIXED_POINT_ONE // unit, MAX_TIME)
        expected = slopes[rank] * x // FIXED_POINT_ONE + offsets[rank]
        y = min(y, max(expected, 1) * MAX_OUTLIER)
        means[rank, MEASURED] += (x - means[rank, MEASURED]) // SMOOTHING_STEPS
        means[rank, REAL] += (y - means[rank, REAL]) // SMOOTHING_STEPS
        num = min(means[rank, NUM_STEPS] + 1, MEMORY_STEPS)
        means[rank, NUM_STEPS] = num
        means[rank, FITTED_MEASURED] += ((x << MEAN_BITS) - means[rank, FITTED_MEASURED]) // num
        means[rank, FITTED_REAL] += ((y << MEAN_BITS) - means[rank, FITTED_REAL]) // num
        means[rank, SQUARES] += ((x * x << MEAN_BITS) - means[rank, SQUARES]) // num
        means[rank, PRODUCTS] += ((x * y << MEAN_BITS) - means[rank, PRODUCTS]) // num
        mean_x, mean_y = means[rank, FITTED_MEASURED], means[rank, FITTED_REAL]
        variance = max(0, means[rank, SQUARES] - (mean_x * mean_x >> MEAN_BITS))
        covariance = means[rank, PRODUCTS] - (mean_x * mean_y >> MEAN_BITS)
        ratio = max(means[rank, REAL] * FIXED_POINT_ONE // max(means[rank, MEASURED], 1), 1)
        weight = np.int64(ASSUMED_WEIGHT << MEAN_BITS)
        slope = (num * covariance * FIXED_POINT_ONE + weight * ratio) // (num * variance + weight)
        slopes[rank] = min(max(slope, ratio // MAX_SLOPE_RATIO), ratio * MAX_SLOPE_RATIO)
        offsets[rank] = means[rank, REAL] - slopes[rank] * means[rank, MEASURED] // FIXED_POINT_ONE


@compiled
def _expect(measured, means, slopes, offsets, times):
    slope, offset, least, most = np.int64(0), np.int64(0), np.int64(1) << 62, np.int64(1)
    for rank in range(len(slopes)):
        ratio = max(means[rank, REAL] * FIXED_POINT_ONE // max(means[rank, MEASURED], 1), 1)
        slope, offset = slope + slopes[rank], offset + offsets[rank]
        least, most = min(least, ratio), max(most, ratio)
    is_equal = most * FIXED_POINT_ONE <= least * (FIXED_POINT_ONE + EQUAL_SPREAD)
    slope, offset = slope // len(slopes), offset // len(slopes)
    for rank in range(len(slopes)):
        if not is_equal:
            slope, offset = slopes[rank], offsets[rank]
        fixed = offset * max(measured[rank, 1], 1)
        for place in range(measured.shape[1]):
            times[rank, place] = max((slope * measured[rank, place] + fixed) // FIXED_POINT_ONE, 1)
