"""Allocation of replicas to jobs, updated as jobs and replicas come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lp_runtime.launchers.base import Launcher
from lp_runtime.model.kv_cache.slots import OVERHEAD_TOKENS, initial_text_tokens
from lp_runtime.sampling.processors import is_ordered
from lp_runtime.scheduler.job import Job, JobLease
from lp_runtime.scheduler.lp_degree import DegreeSpeeds

MIN_LEFT_TOKENS = 32  # a job with fewer tokens left is not moved: new replicas must prefill first


class Allocator:
    """Allocates replicas to jobs. Guarded by the scheduler's condition."""

    def __init__(self, launcher: Launcher, running: list[JobLease], policy: str, max_batch: int):
        self.speeds = DegreeSpeeds()
        self._running = running  # leases of the running jobs; the job runner appends and removes them
        self._launcher = launcher
        self._policy = policy
        self._max_batch = max_batch if policy != "latency" else 1

    @property
    def _batch(self) -> int:
        """Largest number of requests that a replica of this launcher decodes in one forward pass."""
        return self._max_batch if self._launcher.info.supports_batching else 1

    def max_running(self, replicas: Collection[int] | None) -> int:
        """Return how many jobs may run at once on these replicas; 1 for None, a launcher without leases."""
        return 1 if replicas is None or self._policy == "latency" else max(1, len(replicas)) * self._batch

    def allocate(self, ready: frozenset[int], waiting: Collection[Job]) -> Iterator[tuple[Job, list[int]]]:
        """Allocate ready replicas to running jobs, and to waiting jobs that can begin, in order of arrival.

        Yields (job, replicas) of each job to begin now; the caller must add its lease to the running ones before it
        asks for the next.
        """
        num_new = min(len(waiting), self.max_running(ready) - len(self._running))
        beginning = list(waiting)[: max(0, num_new)]
        must_wait = len(waiting) > len(beginning)
        jobs = [lease.job for lease in self._running] + beginning
        degrees = target_degrees(len(ready), [self._max_degree(job, len(ready), len(jobs)) for job in jobs])
        free = sorted(ready - {index for lease in self._running for index in lease.held})
        num_running = len(self._running)
        self._shrink_or_refill(degrees, ready, free)
        for job, degree in zip(beginning, degrees[num_running:], strict=True):
            members = free[:degree]
            if not members and len(jobs) > len(ready):
                members = self._replica_to_share(job, ready)
            if not members:
                return
            yield job, members
            free = [index for index in free if index not in members]
        if not must_wait:
            self._spread(degrees, free)

    def _max_degree(self, job: Job, num_ready: int, num_jobs: int) -> int:
        """Return the largest useful number of replicas for a job, which is decided once."""
        if job.max_degree is None:
            job.max_degree = self._choose_degree(job, num_ready, num_jobs)
        return job.max_degree

    def _choose_degree(self, job: Job, num_ready: int, num_jobs: int) -> int:
        if job.max_replicas is not None:
            return job.max_replicas
        if self._policy == "throughput" or any(map(is_ordered, job.request.processors)):
            return 1
        num_replicas = self._launcher.num_replicas
        if self._policy == "latency":
            return num_replicas
        degree = self.speeds.choose(num_ready) if num_jobs == 1 else self.speeds.fastest(num_ready)
        return num_replicas if degree == num_ready else degree

    def _shrink_or_refill(self, degrees: list[int], ready: frozenset[int], free: list[int]) -> None:
        """Take replicas from jobs that have too many, and give one to each job that has lost all it had.

        `degrees` begin with those of the running jobs. Replicas that are given away are removed from `free`.
        """
        for lease, degree in zip(self._running, degrees, strict=False):
            if len(lease.wanted & ready) > degree:
                lease.shrink(degree)
            elif not lease.wanted:
                lease.wanted = frozenset([free.pop(0)] if free else self._replica_to_share(lease.job, ready))

    def _replica_to_share(self, job: Job, ready: frozenset[int]) -> list[int]:
        """Return [the replica with the fewest jobs] among those whose batch can include this job; else []."""
        leases_on: dict[int, list[JobLease]] = {}
        for lease in self._running:
            for index in lease.held:
                leases_on.setdefault(index, []).append(lease)
        candidates = [
            (len(leases), index)
            for index, leases in leases_on.items()
            if index in ready and self._fits_with(job, leases)
        ]
        return [min(candidates)[1]] if candidates else []

    def _fits_with(self, job: Job, leases: list[JobLease]) -> bool:
        """Whether a job fits into one batch with a replica's jobs, which must all use only that replica."""
        if len(leases) >= self._batch or not all(len(lease.current) == 1 and lease.is_settled for lease in leases):
            return False
        needed = _slot_tokens(job, 0) + sum(_slot_tokens(lease.job, lease.num_delivered) for lease in leases)
        capacity = self._launcher.info.capacity
        return capacity is None or needed <= capacity + OVERHEAD_TOKENS

    def _spread(self, degrees: list[int], free: list[int]) -> None:
        """Give free replicas to jobs that share one or have fewer than their target. No job may be waiting."""
        # Jobs without a first token come first: the replica they share may be in a long step of another job.
        for lease, degree in sorted(
            zip(self._running, degrees, strict=False), key=lambda pair: pair[0].num_delivered > 0
        ):
            if not free:
                return
            if not _can_move(lease):
                continue
            others = [other for other in self._running if other is not lease]
            if any(other.wanted & lease.wanted for other in others):
                lease.wanted = frozenset([free.pop(0)])
            elif lease.num_delivered and not any(other.held & lease.wanted for other in others):
                more = free[: max(0, degree - len(lease.wanted))]  # now that other jobs have left its replicas
                lease.wanted |= frozenset(more)
                del free[: len(more)]


def target_degrees(num_replicas: int, max_degrees: Sequence[int]) -> list[int]:
    """Return how many replicas each job should have, given the largest useful degree of each.

    Each job gets 1, even if there are more jobs than replicas. The rest is dealt out one by one, in turn, up to each
    job's largest degree.
    """
    degrees = [1] * len(max_degrees)
    left = num_replicas - len(max_degrees)
    while left > 0:
        growing = [number for number, most in enumerate(max_degrees) if degrees[number] < most][:left]
        if not growing:
            break
        for number in growing:
            degrees[number] += 1
        left -= len(growing)
    return degrees


def _can_move(lease: JobLease) -> bool:
    """Whether a job may move: it is not moving, and has either delivered nothing or enough tokens left."""
    has_enough = not lease.num_delivered or lease.num_left >= MIN_LEFT_TOKENS
    return bool(has_enough and lease.is_settled and lease.wanted)


def _slot_tokens(job: Job, num_delivered: int) -> int:
    """Return the token capacity that a job's KV-cache slot has, or needs at first; it grows with the text."""
    request = job.request
    text = initial_text_tokens(len(request.prompt_ids), num_delivered, request.max_new_tokens)
    return text + OVERHEAD_TOKENS
