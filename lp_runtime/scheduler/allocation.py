"""The allocation: which replicas each job has, as jobs and replicas come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lp_runtime.launchers.base import Launcher
from lp_runtime.sampling.processors import is_ordered
from lp_runtime.scheduler.job import Job, JobLease
from lp_runtime.scheduler.lp_degree import DegreeSpeeds

MIN_LEFT_TOKENS = 32  # that a job must still want to be given other replicas: new ones must prefill first
# Tokens of a KV-cache slot beside the prompt's and the new ones: those of a step (MAX_STEP_TOKENS), and what the slot's
# size is rounded up by (CAPACITY_UNIT and the largest captured step).
SLOT_OVERHEAD_TOKENS = 2560


class Allocator:
    """Allocates replicas to jobs. The scheduler's condition guards all of it.

    Args:
        running: leases of the running jobs, which the scheduler appends and removes.
        max_batch: requests that a replica decodes in one forward pass at most.
    """

    def __init__(self, launcher: Launcher, running: list[JobLease], policy: str, max_batch: int):
        self.speeds = DegreeSpeeds()
        self._running = running
        self._launcher = launcher
        self._policy = policy
        self._max_batch = max_batch if policy != "latency" else 1

    @property
    def _batch(self) -> int:
        """Requests that a replica of this launcher decodes in one forward pass at most."""
        return self._max_batch if self._launcher.info.supports_batching else 1

    def max_running(self, replicas: Collection[int] | None) -> int:
        """Return how many jobs may run at once on some replicas; None is a launcher that runs one job at a time."""
        return 1 if replicas is None or self._policy == "latency" else max(1, len(replicas)) * self._batch

    def allocate(self, ready: frozenset[int], waiting: Collection[Job]) -> Iterator[tuple[Job, list[int]]]:
        """Allocate the ready replicas to the running jobs, and to waiting ones that can begin.

        Args:
            ready: replicas that are up, by index.
            waiting: jobs that have not begun, in order of arrival.

        Yields:
            (job, replicas) of each job to begin now, in order; the caller adds its lease to the running ones before it
            asks for the next.
        """
        num_new = min(len(waiting), self.max_running(ready) - len(self._running))
        beginning = list(waiting)[: max(0, num_new)]
        must_wait = len(waiting) > len(beginning)
        jobs = [lease.job for lease in self._running] + beginning
        degrees = self._target_degrees(jobs, len(ready))
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

    def _target_degrees(self, jobs: list[Job], num_ready: int) -> list[int]:
        """Return how many replicas each job should have, and decide the largest useful degree of those that begin."""
        max_degrees = []
        for job in jobs:
            if job.max_degree is None:
                job.max_degree = self._max_degree(job, num_ready, len(jobs))
            max_degrees.append(job.max_degree)
        return target_degrees(num_ready, max_degrees)

    def _max_degree(self, job: Job, num_ready: int, num_jobs: int) -> int:
        """Return the largest number of replicas that are of use to a job."""
        if job.gpus is not None:
            return job.gpus
        if self._policy == "throughput" or any(map(is_ordered, job.request.processors)):
            return 1
        num_replicas = self._launcher.num_replicas
        if self._policy == "latency":
            return num_replicas
        degree = self.speeds.choose(num_ready) if num_jobs == 1 else self.speeds.fastest(num_ready)
        return num_replicas if degree == num_ready else degree

    def _shrink_or_refill(self, degrees: list[int], ready: frozenset[int], free: list[int]) -> None:
        """Take replicas from jobs that have too many, and give one to each job that has lost all it had.

        `degrees` begins with the running jobs' target degrees, in order. `free` are the ready replicas that no job
        holds; those that are given are removed.
        """
        for lease, degree in zip(self._running, degrees, strict=False):
            if len(lease.wanted & ready) > degree:
                lease.shrink(degree)
            elif not lease.wanted:
                lease.grow([free.pop(0)] if free else self._replica_to_share(lease.job, ready))

    def _replica_to_share(self, job: Job, ready: frozenset[int]) -> list[int]:
        """Return the replica with the fewest jobs that can decode another beside them; empty if there is none."""
        leases_on: dict[int, list[JobLease]] = {}
        for lease in self._running:
            for index in lease.held:
                leases_on.setdefault(index, []).append(lease)
        found = [
            (len(leases), index)
            for index, leases in leases_on.items()
            if index in ready and self._fits_beside(job, leases)
        ]
        return [min(found)[1]] if found else []

    def _fits_beside(self, job: Job, leases: list[JobLease]) -> bool:
        """Whether a job can be decoded in one batch with the jobs of a replica: each is alone there, and all fit."""
        if len(leases) >= self._batch or not all(len(lease.current) == 1 and lease.is_settled for lease in leases):
            return False
        needed = sum(map(_slot_tokens, (job, *(lease.job for lease in leases))))
        capacity = self._launcher.info.capacity
        return capacity is None or needed <= capacity + SLOT_OVERHEAD_TOKENS

    def _spread(self, degrees: list[int], free: list[int]) -> None:
        """Give free replicas, while no job waits, to jobs that share one or have fewer than they should.

        `degrees` are the running jobs' target degrees, in order. Replicas that are given are removed from `free`.
        """
        # Those that wait for their first token come first: what they share may be deep in a step of another's.
        for lease, degree in sorted(
            zip(self._running, degrees, strict=False), key=lambda pair: pair[0].num_delivered > 0
        ):
            if not free:
                return
            if not _can_move(lease):
                continue
            others = [other for other in self._running if other is not lease]
            if any(other.wanted & lease.wanted for other in others):
                lease.move_to([free.pop(0)])
            elif lease.num_delivered and not any(
                other.held & lease.wanted for other in others
            ):  # others have left its replicas
                more = free[: max(0, degree - len(lease.wanted))]
                lease.grow(more)
                del free[: len(more)]


def target_degrees(num_replicas: int, max_degrees: Sequence[int]) -> list[int]:
    """Return how many replicas each of some jobs should have.

    Each has 1, however many jobs there are. Then each in turn has 1 more until it has its largest degree.
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
    """Whether a job is not being moved, and has either delivered nothing or has enough tokens left."""
    has_enough = not lease.num_delivered or lease.num_left >= MIN_LEFT_TOKENS
    return bool(has_enough and lease.is_settled and lease.wanted)


def _slot_tokens(job: Job) -> int:
    """Return the tokens that a job's KV-cache slot must hold."""
    return len(job.request.prompt_ids) + job.request.max_new_tokens + SLOT_OVERHEAD_TOKENS
