"""Many requests on one runtime: a bounded queue, and a thread that decodes them in their order, each on all replicas.

The thread alone touches the replicas. Whoever has submitted a request reads its pieces from a queue of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from lp_runtime.api import LookaheadRuntime
from lp_runtime.decoding import Request
from lp_runtime.errors import BusyError, DeadlineError, LookaheadError, ReplicaError, unforeseen_as
from lp_runtime.generation import Generation, Piece

TEND_SECONDS = 0.5  # between looks at idle replicas


class Job:
    """A request that was submitted. Iterate over its pieces, or wait for its result; from any one thread.

    Attributes:
        request: what is decoded.
        generation: the whole, once all pieces have been read; None before.
    """

    def __init__(self, request: Request, deadline: float | None):
        self.request = request
        self.generation: Generation | None = None
        self.deadline = deadline  # on time.monotonic's clock
        self.is_cancelled = False
        self._items: queue.SimpleQueue[Piece | Generation | LookaheadError] = queue.SimpleQueue()
        self._listener = None

    def cancel(self) -> None:
        """Give it up: it ends before its next step, or before it begins. Safe to call at any time, from any thread."""
        self.is_cancelled = True

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they come.

        Raises:
            LookaheadError: as `LookaheadRuntime.generate` does; DeadlineError if it has not begun in time.
        """
        while True:
            piece = self._take(self._items.get())
            if piece is None:
                return
            yield piece

    def result(self) -> Generation:
        """The whole; waits for it. Raises as iterating does."""
        for _ in self:
            pass
        return self.generation

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces as they come, for asyncio; instead of iterating. Ending the iteration early cancels the job."""
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
                piece = self._take(item)
                if piece is None:
                    return
                yield piece
        finally:
            self._listener = None
            if self.generation is None:
                self.cancel()

    def _take(self, item: Piece | Generation | LookaheadError) -> Piece | None:
        if isinstance(item, LookaheadError):
            raise item
        if isinstance(item, Generation):
            self.generation = item
            return None
        return item

    def put(self, item: Piece | Generation | LookaheadError) -> None:
        """For the scheduler."""
        self._items.put(item)
        listener = self._listener
        if listener is not None:
            try:
                listener()
            except RuntimeError:  # its event loop has ended
                self.cancel()


@dataclass
class Totals:
    """What a scheduler has done since it began. Read by others while it changes.

    Attributes:
        requests: by how they ended: a finish_reason, "cancelled", "expired" or "failed".
        prompt_tokens, new_tokens, steps, losses: of all that were decoded.
        fed, accepted: tokens by source, where policies count them.
        seconds: that steps took, by part (forward, exchange, other), and the prefills'.
    """

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    losses: int = 0
    fed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, request: Request, done: Generation) -> None:
        self.count(done.finish_reason)
        self.prompt_tokens += len(request.prompt_ids)
        self.new_tokens += done.num_tokens
        self.steps += done.steps
        self.losses += done.losses
        for name, fed, accepted in zip(
            done.counts.sources, done.counts.fed.sum(1).tolist(), done.counts.accepted.sum(1).tolist(), strict=True
        ):
            self.fed[name] = self.fed.get(name, 0) + fed
            self.accepted[name] = self.accepted.get(name, 0) + accepted
        for name, value in {**vars(done.times), "prefill": done.prefill_seconds}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def count(self, outcome: str) -> None:
        self.requests[outcome] = self.requests.get(outcome, 0) + 1


class Scheduler:
    """Decodes what is submitted, in order of arrival, each request on all replicas. Use it in a `with` block.

    Args:
        runtime: whose replicas are used; nobody else must use it meanwhile.
        max_waiting: requests that may wait for others to end, >= 0.

    Attributes:
        totals: what it has done.
        is_healthy: whether a replica is there, as far as is known.
    """

    def __init__(self, runtime: LookaheadRuntime, max_waiting: int = 64):
        self.totals = Totals()
        self.is_healthy = True
        self._runtime = runtime
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="lp-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._current is not None)

    def submit(self, request: Request, timeout: float | None = None) -> Job:
        """Put a request at the end of the queue.

        Args:
            request: as `LookaheadRuntime.request` makes one.
            timeout: seconds within which it must have begun; None for no limit.

        Raises:
            BusyError: if too many are waiting already.
            ReplicaError: if the scheduler is closed.
        """
        return self.submit_all([request], timeout)[0]

    def submit_all(self, requests: list[Request], timeout: float | None = None) -> list[Job]:
        """Put requests at the end of the queue, all of them or none. See `submit`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        jobs = [Job(request, deadline) for request in requests]
        with self._changed:
            if self._is_closed:
                raise ReplicaError("the scheduler is closed")
            num_free = self._max_waiting + (self._current is None)
            if len(self._waiting) + len(jobs) > num_free:
                raise BusyError(
                    f"busy: {len(self._waiting)} requests are waiting, and at most {self._max_waiting} may; try later"
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()
        return jobs

    def close(self) -> None:
        """Cancel everything, and wait until the replicas are free."""
        with self._changed:
            self._is_closed = True
            for job in itertools.chain(self._waiting, filter(None, [self._current])):
                job.cancel()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.is_cancelled:
                    self.totals.count("cancelled")
                    job.put(ReplicaError("the request was cancelled before it began"))
                elif job.deadline is not None and time.monotonic() > job.deadline:
                    self.totals.count("expired")
                    job.put(DeadlineError("the request has waited for too long"))
                else:
                    self._decode(job)
            finally:
                with self._changed:
                    self._current = None

    def _next(self) -> Job | None:
        """The next job; None at the end. Looks after idle replicas meanwhile."""
        while True:
            with self._changed:
                if not self._waiting and not self._is_closed:
                    self._changed.wait(TEND_SECONDS)
                if self._waiting:
                    self._current = self._waiting.popleft()
                    return self._current
                if self._is_closed:
                    return None
            self.is_healthy = self._runtime.tend()

    def _decode(self, job: Job) -> None:
        stream = None
        try:
            with unforeseen_as(ReplicaError, "the request failed"):
                stream = self._runtime.stream_request(job.request)
                for piece in stream:
                    job.put(piece)
                    if job.is_cancelled:
                        break
                if stream.generation is None:
                    stream.close()
                    self.totals.count("cancelled")
                    job.put(ReplicaError("the request was cancelled"))
                else:
                    self.totals.add(job.request, stream.generation)
                    job.put(stream.generation)
            self.is_healthy = True
        except LookaheadError as error:
            self.totals.count("failed")
            job.put(error)
            self.is_healthy = self._runtime.tend()
