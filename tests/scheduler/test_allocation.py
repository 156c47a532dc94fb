"""The allocation of replicas to jobs: how many each gets, which replicas are shared, and which jobs move."""

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


def job(max_new_tokens: int = 100, **fields) -> Job:
    return Job(Request((5,) * 10, PLAIN, max_new_tokens, **fields), None)


def leased(allocated: Job, *members: int, num_delivered: int = 0) -> JobLease:
    """Return the lease of a job that runs on its replicas."""
    lease = JobLease(allocated, members, threading.Condition(), 1.0, lambda: True)
    lease.settle()
    lease.num_delivered = num_delivered
    return lease


def moving(job: Job, member: int) -> JobLease:
    """Return the lease of a job that has yet to move to its replica, which therefore cannot be shared."""
    return JobLease(job, [member], threading.Condition(), 1.0, lambda: True)


def allocated(running: list[JobLease], waiting: list[Job], ready: set[int], max_batch: int = 2) -> list[list[int]]:
    """Return the replicas of the waiting jobs that can begin, on a runtime of two replicas."""
    info = SimpleNamespace(supports_batching=True, capacity=None)
    allocator = Allocator(SimpleNamespace(info=info, num_replicas=2), running, "fair", max_batch)
    members_of_each = []
    for waiting_job, members in allocator.allocate(frozenset(ready), waiting):
        running.append(leased(waiting_job, *members))
        members_of_each.append(members)
    return members_of_each


def test_batch_of_a_replica_is_limited():
    running: list[JobLease] = []
    assert allocated(running, [job() for _ in range(5)], {0, 1}) == [[0], [1], [0], [1]]
    full = [leased(job(), 0), leased(job(), 0), moving(job(), 1)]
    assert allocated(full, [job()], {0, 1}) == []
    assert allocated(full, [job()], {0, 1}, max_batch=3) == [[0]]


def test_lost_replica_is_not_shared():
    running = [leased(job(), 0), moving(job(), 1)]
    assert allocated(running, [job()], {1}, max_batch=3) == []
    assert allocated(running, [job()], {0, 1}, max_batch=3) == [[0]]


class OrderedProcessor:
    """A processor that may keep a state."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(("processors", "members"), [((), [0, 1]), ((OrderedProcessor(),), [0])])
def test_request_with_ordered_processors_gets_one_replica(processors, members):
    assert allocated([], [job(processors=processors)], {0, 1}) == [members]


@pytest.mark.parametrize(("num_delivered", "wanted"), [(50, {0, 1}), (90, {0})])
def test_free_replica_joins_a_request_unless_that_ends_soon(num_delivered, wanted):
    running = [leased(job(), 0, num_delivered=num_delivered)]
    allocated(running, [], {0, 1})
    assert running[0].wanted == wanted
