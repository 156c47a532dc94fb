"""The cost model: the time of a pass for each number of tokens."""

import numpy as np

from lp_runtime.sizing.cost_model import interpolate, shared_times


def test_times_pass_through_measured_points_after_lowering_outliers():
    times = interpolate([1, 4, 8], [100, 90, 200], 16)
    assert times[[1, 4, 8]].tolist() == [90, 90, 200]
    assert (np.diff(times) >= 0).all()
    assert times[16] == 90 + 110 * 3
    assert interpolate([1], [100], 5).tolist() == [100] * 6


def test_request_in_batch_is_charged_its_share_of_pass_time():
    times = interpolate([1, 4, 8], [100, 100, 180], 8)[None]  # 20 for each token after the fourth
    assert shared_times(times, 1).tolist() == times.tolist()
    assert shared_times(times, 2)[0, [1, 2, 4, 8]].tolist() == [50, 50, 90, 170]


def test_padded_pass_costs_as_much_as_next_size():
    times = interpolate([1, 16, 24, 40], [100, 160, 240, 400], 50, num_padded=24)
    assert times[:26].tolist() == [100] * 2 + [160] * 15 + [240] * 8 + [250]
    assert times[[40, 50]].tolist() == [400, 500]
    assert interpolate([1, 16, 24], [100, 160, 240], 20, num_padded=256)[16:].tolist() == [160] + [240] * 4
