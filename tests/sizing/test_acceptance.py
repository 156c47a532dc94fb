"""Path probabilities, corrected per level by the observed acceptance."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS
from lp_runtime.sizing.acceptance import (
    EXPECTED_BITS,
    MAX_DISCOUNT,
    STARTING_CORRECTIONS,
    AcceptanceCalibration,
)


def fixed_point(*probabilities: float) -> np.ndarray:
    return (np.array(probabilities) * 2**PATH_PROBABILITY_BITS).astype(np.int64)


def corrected(calibration: AcceptanceCalibration, *probabilities: float) -> list[float]:
    return (calibration.corrected(fixed_point(*probabilities)) / 2**EXPECTED_BITS).tolist()


@pytest.mark.parametrize("level", range(len(STARTING_CORRECTIONS)))
def test_each_level_starts_with_its_correction(level):
    probability = 0.75 / 2**level
    assert corrected(AcceptanceCalibration(), probability) == pytest.approx(
        [probability * STARTING_CORRECTIONS[level]], rel=0.01
    )


@pytest.mark.parametrize("odds", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("probability", [0.6, 0.3, 0.02])
def test_corrections_converge_to_observed_acceptance(probability, odds):
    calibration, rng = AcceptanceCalibration(), random.Random(0)
    fed = np.concatenate([fixed_point(0.0), np.repeat(fixed_point(probability), 20)])
    truth = min(1.0, odds * probability)
    for _ in range(400):
        calibration.observe(fed, 1, [node for node in range(1, 21) if rng.random() < truth])
    assert corrected(calibration, probability) == pytest.approx([truth], rel=0.35)
    other = 0.1  # of a level that was not fed
    assert corrected(calibration, other) == corrected(AcceptanceCalibration(), other)


def test_correction_of_rejected_nodes_is_bounded_and_recovers():
    calibration, fed = AcceptanceCalibration(), fixed_point(0.0, 0.6, 0.3)
    for _ in range(500):
        calibration.observe(fed, 1, [])
    doubted = corrected(calibration, 0.6)[0]
    assert doubted == pytest.approx(0.6 / MAX_DISCOUNT, rel=0.01)
    for _ in range(100):
        calibration.restore()
    assert doubted < corrected(calibration, 0.6)[0] <= 0.6


def test_recovery_does_not_lower_corrections_above_1():
    calibration, fed = AcceptanceCalibration(), fixed_point(0.0, 0.3)
    for _ in range(20):
        calibration.observe(fed, 1, [1])
    hopeful = corrected(calibration, 0.3)
    calibration.restore()
    assert corrected(calibration, 0.3) == hopeful > [0.3]


def test_corrected_probabilities_stay_between_0_and_1():
    calibration, fed = AcceptanceCalibration(), fixed_point(0.0, 0.9, 0.9)
    for _ in range(100):
        calibration.observe(fed, 1, [1, 2])
    assert corrected(calibration, 0.0, 0.95, 1.0) == [0.0, 1.0, 1.0]
