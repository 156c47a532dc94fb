"""Which replicas each request of a scheduler runs on: how many it should have, and which, as requests come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lp_runtime.launchers.base import Launcher
from lp_runtime.scheduler.job import Job, Share
from lp_runtime.scheduler.lp_degree import DegreeSpeeds

WORTH_MOVING = 32  # tokens that a request must have left to be given other replicas: new ones must prefill
STEP_ROOM = 2560  # tokens of a step, which need room in a cache, too, and what its size is rounded up by


class Allocator:
    """Divides replicas among requests. All of it is guarded by the scheduler's condition.

    Args:
        launcher: of the replicas.
        running: what runs, and where; whoever starts and ends requests keeps it.
        policy: one of SCHEDULING_POLICIES; see Scheduler.
        max_batch: requests that a replica decodes in one forward pass at most.

    Attributes:
        speeds: how fast each LP degree has turned out to be.
    """

    def __init__(self, launcher: Launcher, running: list[Share], policy: str, max_batch: int):
        self.speeds = DegreeSpeeds()
        self._running = running
        self._launcher = launcher
        self._policy = policy
        self._max_batch = max_batch if policy != "latency" else 1

    @property
    def _batch(self) -> int:
        return self._max_batch if self._launcher.info.supports_batching else 1

    def most_on(self, replicas: Collection[int] | None) -> int:
        """Requests that may run at once on some replicas; None for those that cannot be divided."""
        return 1 if replicas is None or self._policy == "latency" else max(1, len(replicas)) * self._batch

    def divide(self, ready: frozenset[int], waiting: Collection[Job]) -> Iterator[tuple[Job, list[int]]]:
        """Divide the replicas that are there among what runs and what can be started.

        Args:
            ready: the replicas.
            waiting: requests that have not begun, in their order.

        Yields:
            (job, replicas) of each that is to be started now, in their order; it is among the running ones then.
        """
        num_new = min(len(waiting), self.most_on(ready) - len(self._running))
        starting = list(waiting)[: max(0, num_new)]
        num_left = len(waiting)
        jobs = [share.job for share in self._running] + starting
        for job in jobs:
            if job.limit is None:
                job.limit = self._limit(job, len(ready), len(jobs))
        goals = target_degrees(len(ready), [job.limit for job in jobs])
        free = sorted(ready - {index for share in self._running for index in share.held})
        num_before = len(self._running)
        for share, goal in zip(self._running, goals, strict=False):
            if len(share.wanted & ready) > goal:
                share.shrink(goal)
            elif not share.wanted:  # it has lost all it had
                place = free.pop(0) if free else self._place_beside(share.job, ready)
                if place is not None:
                    share.take([place])
        for job, goal in zip(starting, goals[num_before:], strict=True):
            members = free[:goal]
            if not members and len(jobs) > len(ready):
                place = self._place_beside(job, ready)
                members = [] if place is None else [place]
            if not members:
                return
            yield job, members
            num_left -= 1
            free = [index for index in free if index not in members]
        if not num_left:
            self._spread(goals, free)

    def _limit(self, job: Job, num_ready: int, num_jobs: int) -> int:
        """Replicas that are of use to a job at most."""
        if job.gpus is not None:
            return job.gpus
        if self._policy == "throughput":
            return 1
        most = self._launcher.num_replicas
        if self._policy == "latency":
            return most
        degree = self.speeds.choose(num_ready) if num_jobs == 1 else self.speeds.best(num_ready)
        return most if degree == num_ready else degree

    def _place_beside(self, job: Job, ready: frozenset[int]) -> int | None:
        """A replica that has requests and takes one more: of those, the one with the fewest."""
        shared: dict[int, list[Share]] = {}
        for share in self._running:
            for index in share.held:
                shared.setdefault(index, []).append(share)
        room = self._launcher.info.capacity
        found = []
        for index, shares in shared.items():
            if index not in ready:
                continue
            is_open = all(len(share.current) == 1 and share.is_settled for share in shares)
            needed = sum(map(_tokens, (job, *(share.job for share in shares))))
            if is_open and len(shares) < self._batch and (room is None or needed <= room + STEP_ROOM):
                found.append((len(shares), index))
        return min(found)[1] if found else None

    def _spread(self, goals: list[int], free: list[int]) -> None:
        """Nobody waits: give free replicas to those that should have more, and to those that share one."""
        for share, goal in zip(self._running, goals, strict=False):
            if not free:
                return
            if not share.num_told or share.num_left < WORTH_MOVING or not share.is_settled or not share.wanted:
                continue
            others = [other for other in self._running if other is not share]
            if any(other.wanted & share.wanted for other in others):
                share.move_to([free.pop(0)])
            elif not any(other.held & share.wanted for other in others):  # they have left
                more = free[: max(0, goal - len(share.wanted))]
                share.take(more)
                del free[: len(more)]


def target_degrees(num_replicas: int, limits: Sequence[int]) -> list[int]:
    """How many replicas each of some requests should have: one each, however many there are, then one more to each in
    turn that has not its limit."""
    goals = [1] * len(limits)
    left = num_replicas - len(limits)
    while left > 0:
        growing = [number for number, limit in enumerate(limits) if goals[number] < limit][:left]
        if not growing:
            break
        for number in growing:
            goals[number] += 1
        left -= len(growing)
    return goals


def _tokens(job: Job) -> int:
    """Room in a cache that a job needs."""
    return len(job.request.prompt_ids) + job.request.max_new_tokens + STEP_ROOM
