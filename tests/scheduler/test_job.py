"""Jobs and their leases, without replicas."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lp_runtime import Delta, Generation, ReplicaError
from lp_runtime.scheduler.job import Job, JobLease, JobState


def test_job_waits_runs_and_finishes():
    job = Job(None, None)
    assert job.state is JobState.WAITING
    job.begin()
    assert job.state is JobState.RUNNING
    job.deliver(Delta("a", [1]))
    job.finish(ReplicaError("lost"))
    assert job.state is JobState.FINISHED
    deltas = iter(job)
    assert next(deltas) == Delta("a", [1])
    with pytest.raises(ReplicaError, match="lost"):
        next(deltas)


def test_end_of_a_job_can_be_read_again():
    failed, finished = Job(None, None), Job(None, None)
    failed.finish(ReplicaError("lost"))
    for read in (failed.result, failed.result, lambda: list(failed), lambda: asyncio.run(anext(failed.deltas()))):
        with pytest.raises(ReplicaError, match="lost"):
            read()
    result = object.__new__(Generation)
    finished.finish(result)
    assert list(finished) == list(finished) == [] and finished.result() is finished.result() is result


def test_lease_tracks_held_and_wanted_replicas():
    lease = JobLease(Job(None, None), [1], threading.Condition(), 1.0, lambda: True)
    assert lease.held == {1} and not lease.is_settled
    lease.settle()
    assert lease.is_settled
    lease.wanted |= {0}
    assert lease.held == {0, 1} and not lease.is_settled
    lease.shrink(1)  # not moved yet: the job stays on 1, and 0 is free at once
    assert lease.wanted == lease.held == {1} and lease.is_settled
    lease.wanted = frozenset([2])
    assert lease.held == {1, 2}
    lease.settle()
    assert lease.held == {2}
    lease.lose([2])
    assert not lease.held


def test_job_cancelled_before_its_decoding_is_cancelled_when_that_begins():
    job, cancelled = Job(None, None), []
    lease = JobLease(job, [1], threading.Condition(), 1.0, lambda: True)
    with lease.cancelling(lambda: cancelled.append("early")):
        assert not cancelled
    job.cancel()
    assert not cancelled, "no replica decodes it"
    with lease.cancelling(lambda: cancelled.append("late")):
        assert cancelled == ["late"]


def test_cancelled_job_does_not_wait_for_other_replicas():
    job = Job(None, None)
    lease = JobLease(job, [1], threading.Condition(), 600.0, lambda: pytest.fail("it asks whether to wait"))
    lease.lose([1])
    job.cancel()
    assert lease.refill() == frozenset()
