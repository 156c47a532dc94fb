"""Test parameters: some always run, the others only with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def thinned(one_in: int, *axes: Iterable[object]) -> list[object]:
    """Return all combinations as parameters; one in `one_in` is not marked as slow.

    A combination always runs if the sum of its indices is a multiple of `one_in`. With several axes, the combinations
    that always run have all values.

    Args:
        axes: values of each parameter, or pytest.param of one value.
    """
    parameters = []
    for places in itertools.product(*(list(enumerate(axis)) for axis in axes)):
        is_kept = sum(place for place, _ in places) % one_in == 0
        values = [value if isinstance(value, ParameterSet) else pytest.param(value) for _, value in places]
        marks = [mark for value in values for mark in value.marks] + ([] if is_kept else [pytest.mark.slow])
        parameters.append(pytest.param(*(each for value in values for each in value.values), marks=marks))
    return parameters
