"""Test parameters: some always run, the others only with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import pytest
from _pytest.mark import ParameterSet


def thinned(one_in: int, *axes: Iterable[object]) -> list[object]:
    """Return all combinations as parameters; about one in `one_in` is not marked as slow.

    A combination always runs if the sum of its indices is a multiple of `one_in`. With several axes, further
    combinations always run, so that every value does, except for those that are marked as slow themselves.

    Args:
        axes: values of each parameter, or pytest.param of one value.
    """
    values = [[value if isinstance(value, ParameterSet) else pytest.param(value) for value in axis] for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in values)))
    kept = {place for place in places if sum(place) % one_in == 0}
    if len(axes) > 1:
        kept |= _covering(kept, [place for place in places if not any(map(_is_slow, _at(values, place)))])
    parameters = []
    for place in places:
        chosen = _at(values, place)
        marks = [mark for value in chosen for mark in value.marks] + ([] if place in kept else [pytest.mark.slow])
        parameters.append(pytest.param(*(each for value in chosen for each in value.values), marks=marks))
    return parameters


def slow(values: Iterable[object], chosen: Collection[object]) -> list[ParameterSet]:
    """Return values as parameters; those in `chosen` run only with the slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow if value in chosen else ()) for value in values]


def _covering(kept: set[tuple[int, ...]], allowed: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return combinations out of `allowed` that have the values of `allowed` missing in `kept`, greedily few."""
    missing = {value for place in allowed for value in enumerate(place)}
    missing -= {value for place in kept.intersection(allowed) for value in enumerate(place)}
    added = set()
    while missing:
        best = max(allowed, key=lambda place: len(missing.intersection(enumerate(place))))
        added.add(best)
        missing -= set(enumerate(best))
    return added


def _at(values: list[list[ParameterSet]], place: tuple[int, ...]) -> list[ParameterSet]:
    return [axis[index] for axis, index in zip(values, place, strict=True)]


def _is_slow(value: ParameterSet) -> bool:
    return any(mark.name == "slow" for mark in value.marks)
