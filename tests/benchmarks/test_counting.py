"""Tests of what studies count: the decoding time of a batch, and the kinds of requests that clients and rows have."""

from __future__ import annotations

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
