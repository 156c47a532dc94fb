"""Parameters that always run: every value of every axis is among them."""

import pytest
from support.thinned import slow, thinned


def always_run(parameters: list) -> list[tuple]:
    return [each.values for each in parameters if not any(mark.name == "slow" for mark in each.marks)]


@pytest.mark.parametrize("one_in", [2, 4, 9, 100])
def test_every_value_of_several_axes_always_runs(one_in):
    axes = [range(4), "ab", range(3)]
    parameters = thinned(one_in, *axes)
    kept = always_run(parameters)
    assert len(parameters) == 24 and {each for each in kept} >= {(0, "a", 0)}
    assert [set(values) for values in zip(*kept, strict=True)] == [set(axis) for axis in axes]
    assert len(kept) <= 24 / one_in + 4


def test_slow_values_are_left_to_the_slow_tests():
    kept = always_run(thinned(100, slow([1, 2, 3], [2]), [True, pytest.param(False, marks=pytest.mark.slow)]))
    assert kept == [(1, True), (3, True)]


def test_values_of_a_single_axis_are_thinned():
    assert always_run(thinned(3, range(5))) == [(0,), (3,)]
