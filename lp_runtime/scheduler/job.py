"""A request in the scheduler's queue (Job), its lease of replicas (JobLease), and statistics (Totals)."""

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

CHECK_SECONDS = 0.2  # between checks of deadlines and of ready replicas, which do not notify the scheduler


class JobState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Job:
    """A submitted request. Iterate over its deltas, or wait for its result, in one thread.

    Attributes:
        request: the request to decode.
        deadline: time.monotonic() after which a job that still waits fails with DeadlineError; None for no limit.
        max_replicas: that the job may use; None leaves it to the scheduler's policy.
        state: waiting, running or finished.
        generation: the result, once all deltas have been read; None before.
        is_cancelled: whether `cancel` was called.
        queue_seconds: seconds from submission to the first replica; None before.
    """

    def __init__(
        self, request: Request, deadline: float | None, max_replicas: int | None = None, scheduler: object = None
    ):
        self.request = request
        self.deadline = deadline
        self.max_replicas = max_replicas
        self.state = JobState.WAITING
        self.max_degree: int | None = None  # largest useful number of replicas, once the allocator has decided
        self.generation: Generation | None = None
        self.is_cancelled = False
        self.queue_seconds: float | None = None
        self.on_cancel: Callable[[], None] | None = None  # cancels the request on the replicas that decode it
        self._scheduler: object = scheduler  # kept alive until the job has ended
        self._submitted = time.monotonic()
        self._items: queue.SimpleQueue[Delta | Generation | LookaheadError] = queue.SimpleQueue()
        self._listener: Callable[[], object] | None = None
        self._error: LookaheadError | None = None  # once it has been raised to the reader

    # For the submitter of the request.

    def cancel(self) -> None:
        """Cancel the job: it ends before its next step or prefill chunk, or before it begins. Thread-safe."""
        self.is_cancelled = True
        if (on_cancel := self.on_cancel) is not None:
            on_cancel()

    def abort(self, error: LookaheadError) -> None:
        """Cancel the job, and raise an error to the reader of its deltas without waiting for the current step."""
        self.deliver(error)
        self.cancel()

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas as they arrive; raises as `result` does. After the end there are none."""
        while not self._has_ended() and (delta := self._unpack(self._items.get())) is not None:
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
        """Yield the deltas as they arrive, in asyncio; raises as `result` does. An early end cancels the job."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._listener = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while not self._has_ended():
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

    def _has_ended(self) -> bool:
        """Whether the result has been read; raises the error of a job that has failed, again."""
        if self._error is not None:
            raise self._error
        return self.generation is not None

    def _unpack(self, item: Delta | Generation | LookaheadError) -> Delta | None:
        if isinstance(item, LookaheadError):
            self._error = item
            raise item
        if isinstance(item, Generation):
            self.generation = item
            return None
        return item

    # For the scheduler.

    def begin(self) -> None:
        self.state = JobState.RUNNING
        self.queue_seconds = time.monotonic() - self._submitted

    def finish(self, outcome: Generation | LookaheadError) -> None:
        self.state = JobState.FINISHED
        self._scheduler = None
        self.deliver(outcome)

    def deliver(self, item: Delta | Generation | LookaheadError) -> None:
        """Queue an item for the reader of the job."""
        self._items.put(item)
        listener = self._listener
        if listener is not None:
            try:
                listener()
            except RuntimeError:  # the reader's event loop is closed
                self.cancel()


@dataclass
class Totals:
    """Sums over all jobs of a scheduler. Other threads read them while they change."""

    requests: dict[str, int] = field(default_factory=dict)  # by finish_reason, or "cancelled", "expired" or "failed"
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    cache_hits: int = 0  # requests with such tokens
    new_tokens: int = 0  # delivered so far, those of running and cancelled jobs included
    steps: int = 0  # that delivered them, prefills included
    losses: int = 0  # replicas lost while they decoded
    fed: dict[str, int] = field(default_factory=dict)  # draft tokens, by source, if the drafter counts them
    accepted: dict[str, int] = field(default_factory=dict)  # the same
    seconds: dict[str, float] = field(default_factory=dict)  # in each part of a step, and in prefills

    def add(self, request: Request, generation: Generation) -> None:
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += generation.cached_tokens
        self.cache_hits += generation.cached_tokens > 0
        self.losses += generation.losses
        counts = generation.counts
        for name, fed, accepted in zip(counts.sources, counts.fed, counts.accepted, strict=True):
            self.fed[name] = self.fed.get(name, 0) + sum(fed)
            self.accepted[name] = self.accepted.get(name, 0) + sum(accepted)
        for name, value in {**vars(generation.times), "prefill": generation.prefill_seconds}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def add_step(self, num_tokens: int) -> None:
        self.new_tokens += num_tokens
        self.steps += num_tokens > 0  # a last delta may only complete the text

    def count(self, ending: str) -> None:
        self.requests[ending] = self.requests.get(ending, 0) + 1


class JobLease(ReplicaLease):
    """Replicas of a running job. Guarded by the scheduler's condition, `changed`."""

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
        self.current: frozenset[int] = frozenset()  # replicas that the job runs on now
        self.num_delivered = 0  # tokens
        self._changed = changed
        self._refill_seconds = refill_seconds  # how long a job that has lost all its replicas waits for others
        self._may_refill = may_refill  # whether any replica is up or loading, so that waiting makes sense

    @property
    def held(self) -> frozenset[int]:
        """Replicas that are not free for others: those the job runs on now and those it moves to."""
        return self.wanted | self.current

    @property
    def num_left(self) -> int:
        return self.job.request.max_new_tokens - self.num_delivered

    @property
    def is_settled(self) -> bool:
        """Whether the job runs on its wanted replicas, and so is not moving."""
        return self.current == self.wanted

    def shrink(self, size: int) -> None:
        """Keep `size` replicas, preferably those that the job runs on, lowest index (rank 0) first."""
        by_preference = sorted(self.wanted & self.current) + sorted(self.wanted - self.current)
        self.wanted = frozenset(by_preference[:size])

    @contextmanager
    def cancelling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call `cancel` when the job is cancelled during the block; at once if it was cancelled before."""
        self.job.on_cancel = cancel
        if self.job.is_cancelled:
            cancel()
        try:
            yield
        finally:
            self.job.on_cancel = None

    def lose(self, lost: Iterable[int]) -> None:
        with self._changed:
            super().lose(lost)
            self.current -= frozenset(lost)
            self._changed.notify_all()

    def settle(self) -> frozenset[int]:
        """Return the replicas for the job's next group; frees those that it has left."""
        with self._changed:
            self.current = self.wanted
            self._changed.notify_all()
            return self.wanted

    def refill(self) -> frozenset[int]:
        """Wait until the job is allocated replicas again, and return them; empty if it gets none in time."""
        deadline = time.monotonic() + self._refill_seconds
        with self._changed:
            while not self.wanted and not self.job.is_cancelled and time.monotonic() < deadline and self._may_refill():
                self._changed.wait(CHECK_SECONDS)
            self.current = self.wanted
            return self.wanted
