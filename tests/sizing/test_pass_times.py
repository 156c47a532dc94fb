"""Pass times: lines fitted from measured times to the times of real steps."""

import numpy as np
import pytest

from lp_runtime.sizing.cost_model import CostModel, assumed_times, interpolate
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE, MAX_SLOPE_RATIO, PassTimes

MEASURED = interpolate([1, 8, 16, 64], [14_000_000, 19_000_000, 25_000_000, 63_000_000], 64)[None]


def taught(took, sizes, measured: np.ndarray = MEASURED, noise: float = 0.0, num_steps: int = 200) -> PassTimes:
    """Return pass times learned from steps of these sizes in turn; `took` maps measured to real times."""
    passes, random = PassTimes(len(measured)), np.random.default_rng(0)
    for step in range(num_steps):
        size = np.full(len(measured), sizes[step % len(sizes)])
        nanoseconds = np.array([took(rank, times[size[0]]) for rank, times in enumerate(measured)])
        passes.observe(measured, size, (nanoseconds * (1 + noise * abs(random.normal()))).astype(np.int64))
    return passes


def expected(passes: PassTimes, measured: np.ndarray = MEASURED) -> np.ndarray:
    """Return the expected times, [R, M + 1]."""
    times = np.empty_like(measured)
    passes.expect(measured, times)
    return times


def test_expected_times_are_measured_times_before_first_step():
    assert (expected(PassTimes(1)) == MEASURED).all()


@pytest.mark.parametrize(
    "took",
    [
        lambda time: 2 * time,  # half as many cores
        lambda time: 4_000_000 + time,  # others use the memory
        lambda time: 9_000_000 + 0.6 * time,
        lambda time: 1.5 * time - 6_000_000,  # measured while others used the memory
    ],
)
@pytest.mark.parametrize("noise", [0, 0.05])
def test_learned_line_predicts_sizes_that_were_not_fed(took, noise):
    passes = taught(lambda rank, time: took(time), (3, 6, 12, 20), noise=noise)
    for size in (1, 2, 8, 16, 32):
        assert expected(passes)[0, size] == pytest.approx(took(MEASURED[0, size]) * (1 + 0.8 * noise), rel=0.04)


def test_steps_of_one_size_teach_one_factor_for_all_sizes():
    passes = taught(lambda rank, time: 3 * time, (8,))
    assert np.abs(expected(passes) / MEASURED - 3).max() < 0.02


def test_expected_times_scale_with_measured_times():
    passes = taught(lambda rank, time: 9_000_000 + 0.6 * time, (3, 6, 12, 20))
    assert np.abs(expected(passes, 5 * MEASURED) / expected(passes) - 5).max() < 0.01


def test_learned_line_follows_change_of_pass_times():
    passes = taught(lambda rank, time: time, (3, 6, 12, 20))
    for step in range(80):
        size = np.array([(3, 6, 12, 20)[step % 4]])
        passes.observe(MEASURED, size, MEASURED[0, size] + 6_000_000)
    assert expected(passes)[0, [1, 8, 32]] == pytest.approx(MEASURED[0, [1, 8, 32]] + 6_000_000, rel=0.05)


def test_single_outlier_barely_changes_line():
    passes = taught(lambda rank, time: time, (3, 6, 12, 20))
    passes.observe(MEASURED, np.array([20]), 50 * MEASURED[0, [20]])
    assert passes.slopes[0] < 1.3 * FIXED_POINT_ONE
    for step in range(60):
        size = np.array([(3, 6, 12, 20)[step % 4]])
        passes.observe(MEASURED, size, MEASURED[0, size])
    assert np.abs(expected(passes) / MEASURED - 1).max() < 0.05


def test_expected_times_are_positive_and_never_decrease_with_size():
    random = np.random.default_rng(1)
    for _ in range(20):
        measured = np.sort(random.integers(1, 1 << 36, (2, 65)))
        passes = PassTimes(2)
        for _ in range(60):
            passes.observe(measured, random.integers(1, 65, 2), random.integers(1, 1 << 40, 2))
            times = expected(passes, measured)
            assert (times > 0).all() and (np.diff(times) >= 0).all()


def test_slope_is_bounded_by_that_of_the_line_through_zero():
    """Real times rise four times as steeply as measured ones, but are only 1.3 times as long on average."""
    passes = taught(lambda rank, time: 4 * time - 50_000_000, (3, 12))
    assert passes.slopes[0] <= MAX_SLOPE_RATIO * 1.4 * FIXED_POINT_ONE


def test_replicas_of_similar_speed_count_as_equally_fast():
    measured = np.tile(MEASURED, (2, 1))
    times = expected(taught(lambda rank, time: (100 + 7 * rank) * time // 100, (3, 6, 12, 20), measured), measured)
    assert times[0].tolist() == times[1].tolist() and (times > measured).all()
    times = expected(taught(lambda rank, time: (1 + rank) * time, (3, 6, 12, 20), measured), measured)
    assert np.abs(times / measured - [[1], [2]]).max() < 0.02


def test_request_in_batch_is_expected_to_take_its_share():
    model = CostModel(assumed_times(1, 8), taught(lambda rank, time: 2 * time, (4,), assumed_times(1, 8)))
    alone = model.times.copy()
    model.set_batch_size(4)
    assert model.times[0, 1] == pytest.approx(model.measured[0, 1] * 2, rel=0.01) and model.times[0, 1] < alone[0, 1]
