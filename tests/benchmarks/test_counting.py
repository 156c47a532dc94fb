"""Tests of what studies count: the decoding time of a batch, and the kinds of requests that clients and rows have."""

from __future__ import annotations

import itertools

import pytest
from support.benchmarks import command

from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.step_timer import StepTimes


def study(name: str):
    """Return a module of benchmarks/studies/."""
    return command("common.py").load_study(name)


def report(num_steps: int) -> Report:
    return Report(num_steps, "length", 1.0, 1.0, 1.0, StepTimes(0.0, 0.0, 0.0), 0.0, None, None, None)


def test_decoding_time_of_a_batch_starts_after_its_last_prefill():
    """A request that decodes while another one's prompt is still fed counts from then on."""
    steps = [  # (seconds since the event before, request, tokens)
        (1.0, 0, [1]),
        (1.0, 0, [2, 3]),  # the second prompt takes two chunks
        (4.0, 1, [1]),
        (0.0, 0, [4, 5]),
        (2.0, 1, [2]),
        (0.0, 0, [6]),
        (2.0, 1, [3, 4]),
    ]
    now = 0.0

    def events():
        nonlocal now
        for seconds, key, token_ids in steps:
            now += seconds
            yield key, StepOutput(token_ids)
        yield from ((0, report(4)), (1, report(3)))

    decoded = study("requests").read_batch(events(), 2, clock=lambda: now)
    assert decoded.outputs == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    assert (decoded.seconds, decoded.num_tokens, decoded.num_steps) == (4.0, 6, 2)
    assert decoded.rate == 1.5


def test_time_of_a_batch_of_one_request_starts_with_its_first_token():
    times = iter([0.0, 3.0, 5.0])
    events = [(0, StepOutput([1])), (0, StepOutput([2, 3])), (0, report(2))]
    decoded = study("requests").read_batch(events, 1, clock=lambda: next(times))
    assert (decoded.seconds, decoded.num_tokens, decoded.num_steps) == (2.0, 2, 1)


def test_every_case_of_the_load_is_streamed_and_asked_for_whole():
    """Also in one of two kinds of requests: greedy and sampled ones, with and without a schema."""
    load = study("load")
    cases = load.cases_of(["first", "second", "third", "fourth"], constrained=True)
    for client in range(4):
        asked = set(itertools.islice(load.requests_of(client, cases), 200))
        assert asked == {(case, is_streamed) for case in cases for is_streamed in (False, True)}
    assert {case.is_sampled for case in cases} == {False, True}


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_every_row_of_kills_has_greedy_and_sampled_requests(num_rows):
    kills = study("kills")
    rows = [kills.requests_of_row(place, num_rows, 11) for place in range(num_rows)]
    assert sum(map(len, rows)) == 11
    for row in rows:
        temperatures = [kills.sampling_of(number).temperature for number in row]
        assert abs(temperatures.count(0.0) - len(row) / 2) <= 0.5
