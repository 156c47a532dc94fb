"""A request in the scheduler's queue (Job), its hold on replicas (JobLease), and sums over all jobs (Totals)."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from lp_runtime.errors import LookaheadError
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.request.generation import Delta, Generation
from lp_runtime.request.request import Request

CHECK_SECONDS = 0.2  # between checks of replicas that come or go, and of deadlines: neither notifies the scheduler


class JobState(Enum):
    """Where a job is: in the queue, on replicas, or ended."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Job:
    """A request that was submitted. Iterate over its deltas, or wait for its result, in one thread.

    Args:
        request: what is decoded.
        deadline: time.monotonic() at which waiting ends in a DeadlineError; None for no limit.
        gpus: replicas that it may have at most; None as the scheduler's policy says.

    Attributes:
        request: see Args.
        deadline: see Args.
        gpus: see Args.
        state: waiting, running or finished.
        max_degree: most replicas that are of use to the job; None until the allocator has decided.
        generation: the result, once all deltas have been read; None before.
        is_cancelled: whether `cancel` was called.
        queue_seconds: from submission to the first replica; None before.
        on_cancel: makes the replicas that decode the job end it; None while there are none.
    """

    def __init__(self, request: Request, deadline: float | None, gpus: int | None = None):
        self.request = request
        self.deadline = deadline
        self.gpus = gpus
        self.state = JobState.WAITING
        self.max_degree: int | None = None
        self.generation: Generation | None = None
        self.is_cancelled = False
        self.queue_seconds: float | None = None
        self.on_cancel: Callable[[], None] | None = None
        self._submitted = time.monotonic()
        self._items: queue.SimpleQueue[Delta | Generation | LookaheadError] = queue.SimpleQueue()
        self._listener: Callable[[], object] | None = None

    # For whoever submitted the request.

    def cancel(self) -> None:
        """End the job before its next step or chunk of its prompt, or before it begins. Thread-safe, at any time."""
        self.is_cancelled = True
        if (on_cancel := self.on_cancel) is not None:
            on_cancel()

    def abort(self, error: LookaheadError) -> None:
        """Cancel the job, and raise an error for whoever reads its deltas, without waiting for its step to end."""
        self._put(error)
        self.cancel()

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas as they come.

        Raises:
            LookaheadError: as `LookaheadRuntime.generate` does; DeadlineError if the job has not begun in time.
        """
        while (delta := self._unpack(self._items.get())) is not None:
            yield delta

    def result(self) -> Generation:
        """Wait for the end and return the result.

        Raises:
            LookaheadError: as `LookaheadRuntime.generate` does; DeadlineError if the job has not begun in time.
        """
        for _ in self:
            pass
        return self.final_generation

    @property
    def final_generation(self) -> Generation:
        """The result of a job whose deltas have all been read."""
        assert self.generation is not None
        return self.generation

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the deltas as they come, in asyncio. Ending the iteration early cancels the job.

        Raises:
            LookaheadError: as `LookaheadRuntime.generate` does; DeadlineError if the job has not begun in time.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._listener = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while True:
                try:
                    item = self._items.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                    arrived.clear()
                    continue
                delta = self._unpack(item)
                if delta is None:
                    return
                yield delta
        finally:
            self._listener = None
            if self.generation is None:
                self.cancel()

    def _unpack(self, item: Delta | Generation | LookaheadError) -> Delta | None:
        """Return a delta, or None at the end, where `generation` is set; raise the error that ended the job."""
        if isinstance(item, LookaheadError):
            raise item
        if isinstance(item, Generation):
            self.generation = item
            return None
        return item

    # For the scheduler.

    def begin(self) -> None:
        """Record that the job has got replicas."""
        self.state = JobState.RUNNING
        self.queue_seconds = time.monotonic() - self._submitted

    def deliver(self, delta: Delta) -> None:
        """Hand a delta to whoever iterates over the job."""
        self._put(delta)

    def finish(self, outcome: Generation | LookaheadError) -> None:
        """End the job with its result or its error."""
        self.state = JobState.FINISHED
        self._put(outcome)

    def _put(self, item: Delta | Generation | LookaheadError) -> None:
        self._items.put(item)
        listener = self._listener
        if listener is not None:
            try:
                listener()
            except RuntimeError:  # its event loop has ended
                self.cancel()


@dataclass
class Totals:
    """Sums over all jobs of a scheduler. Other threads read them while they change.

    Attributes:
        requests: jobs by how they ended: a finish_reason, "cancelled", "expired" or "failed".
        cached_tokens: prompt tokens whose keys and values came out of the prefix cache.
        cache_hits: requests that had such tokens.
        steps: steps, prefills included.
        losses: replicas lost while they decoded.
        fed, accepted: draft tokens fed and accepted, by source, where drafters count them.
        seconds: seconds by part of a step (forward, exchange, other), and of prefills.
    """

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    new_tokens: int = 0
    steps: int = 0
    losses: int = 0
    fed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, request: Request, generation: Generation) -> None:
        """Add a request's tokens, steps, drafts and times."""
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += generation.cached_tokens
        self.cache_hits += generation.cached_tokens > 0
        self.new_tokens += generation.num_tokens
        self.steps += generation.steps
        self.losses += generation.losses
        counts = generation.counts
        for name, fed, accepted in zip(
            counts.sources, counts.fed.sum(1).tolist(), counts.accepted.sum(1).tolist(), strict=True
        ):
            self.fed[name] = self.fed.get(name, 0) + fed
            self.accepted[name] = self.accepted.get(name, 0) + accepted
        for name, value in {**vars(generation.times), "prefill": generation.prefill_seconds}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def count(self, ending: str) -> None:
        """Count a job by how it ended."""
        self.requests[ending] = self.requests.get(ending, 0) + 1


class JobLease(ReplicaLease):
    """The replicas of a running job. The scheduler's condition guards all of it.

    Args:
        refill_seconds: how long a job that has lost all its replicas waits for others.
        may_refill: whether there are replicas for the job to wait for.

    Attributes:
        wanted: replicas that the job is to run on, by index.
        current: replicas that the job runs on.
    """

    def __init__(
        self,
        job: Job,
        members: Iterable[int],
        changed: threading.Condition,
        refill_seconds: float,
        may_refill: Callable[[], bool],
    ):
        super().__init__(members)
        self.job = job
        self.current: frozenset[int] = frozenset()
        self.num_delivered = 0
        self._changed = changed
        self._refill_seconds = refill_seconds
        self._may_refill = may_refill

    @property
    def held(self) -> frozenset[int]:
        """Replicas that are not free: where the job is to run, and where it runs until it has moved."""
        return self.wanted | self.current

    @property
    def num_left(self) -> int:
        """Largest number of tokens that are still to come."""
        return self.job.request.max_new_tokens - self.num_delivered

    @property
    def is_settled(self) -> bool:
        """Whether the job runs on the replicas that it is to run on."""
        return self.current == self.wanted

    def grow(self, more: Iterable[int]) -> None:
        """Add replicas."""
        self.wanted |= frozenset(more)

    def shrink(self, size: int) -> None:
        """Keep `size` replicas: first those that the job runs on already, of these rank 0 first."""
        by_preference = sorted(self.wanted & self.current) + sorted(self.wanted - self.current)
        self.wanted = frozenset(by_preference[:size])

    def move_to(self, members: Iterable[int]) -> None:
        """Replace all replicas."""
        self.wanted = frozenset(members)

    @contextmanager
    def cancelling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """In the block, `cancel` is called when the job is cancelled; at once if it was cancelled before."""
        self.job.on_cancel = cancel
        if self.job.is_cancelled:
            cancel()
        try:
            yield
        finally:
            self.job.on_cancel = None

    def lose(self, lost: Iterable[int]) -> None:
        """Remove replicas that were lost."""
        with self._changed:
            super().lose(lost)
            self.current -= frozenset(lost)
            self._changed.notify_all()

    def settle(self) -> frozenset[int]:
        """Return the replicas that the job goes on with, while it is on none; all others are free now."""
        with self._changed:
            self.current = self.wanted
            self._changed.notify_all()
            return self.wanted

    def refill(self) -> frozenset[int]:
        """Wait until a job that has no replica is given some; return them, or none if there are none to wait for."""
        deadline = time.monotonic() + self._refill_seconds
        with self._changed:
            while not self.wanted and not self.job.is_cancelled and time.monotonic() < deadline and self._may_refill():
                self._changed.wait(CHECK_SECONDS)
            self.current = self.wanted
            return self.wanted
