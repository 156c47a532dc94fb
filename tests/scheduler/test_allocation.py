"""The allocation of replicas to jobs: how many each should have."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.request.request import Request
from lp_runtime.scheduler.allocation import Allocator, target_degrees
from lp_runtime.scheduler.job import Job, JobLease


def test_target_degrees_are_assigned_round_robin_up_to_each_maximum():
    assert [target_degrees(4, [4] * jobs) for jobs in (1, 2, 3, 4, 5)] == [
        [4],
        [2, 2],
        [2, 1, 1],
        [1, 1, 1, 1],
        [1] * 5,
    ]
    assert target_degrees(3, [1, 1]) == [1, 1] and target_degrees(3, [8]) == [3] and target_degrees(1, []) == []
    assert target_degrees(8, [1, 3, 8]) == [1, 3, 4] and target_degrees(8, [2, 2]) == [2, 2]


@pytest.mark.parametrize(("num_delivered", "num_running"), [(0, 3), (4000, 2)])
def test_replica_takes_requests_that_fit_with_tokens_written_so_far(num_delivered, num_running):
    """Tokens that requests may still write do not count, because slots grow."""
    info = SimpleNamespace(supports_batching=True, capacity=10_000)
    running: list[JobLease] = []
    allocator = Allocator(SimpleNamespace(info=info, num_replicas=1), running, "throughput", max_batch=8)
    waiting = [Job(Request((5,) * 10, PLAIN, max_new_tokens=8000), None) for _ in range(5)]
    for job, members in allocator.allocate(frozenset({0}), waiting):
        running.append(JobLease(job, members, threading.Condition(), 1.0, lambda: True))
        running[-1].settle()
        running[0].num_delivered = num_delivered
    assert len(running) == num_running
