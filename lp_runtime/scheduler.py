"""Many requests on one runtime: a bounded queue, and the replicas divided among what runs.

A thread divides; every running request has one of its own; whoever has submitted it reads its pieces from a queue.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from lp_runtime.api import LookaheadRuntime
from lp_runtime.checks import require_choice
from lp_runtime.command_config import SCHEDULES
from lp_runtime.decoding import Request
from lp_runtime.errors import BusyError, DeadlineError, LookaheadError, ReplicaError, unforeseen_as
from lp_runtime.generation import Generation, Piece
from lp_runtime.launchers.allotment import Allotment

TEND_SECONDS = 0.2  # between looks whether replicas have come or gone, and whether anybody has waited for too long
WORTH_MOVING = 32  # tokens that a request must have left to be given more replicas: the new ones must prefill


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
        """Count what a request took."""
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
        """Count that a request has ended."""
        self.requests[outcome] = self.requests.get(outcome, 0) + 1


class _Share(Allotment):
    """The replicas of a running job. All of it is guarded by the scheduler's condition.

    Attributes:
        held: what the job may still be on; what leaves `wanted` stays here until the job has left it.
        num_told: tokens that have come.
    """

    def __init__(
        self,
        job: Job,
        members: Iterable[int],
        changed: threading.Condition,
        patience: float,
        may_come: Callable[[], bool],
    ):
        super().__init__(members)
        self.job = job
        self._may_come = may_come
        self.held = set(self.wanted)
        self.num_told = 0
        self._changed = changed
        self._patience = patience

    def take(self, more: Iterable[int]) -> None:
        """The job may use these, too."""
        self.wanted |= frozenset(more)
        self.held |= self.wanted

    def lose(self, lost: Iterable[int]) -> None:
        with self._changed:
            super().lose(lost)
            self.held -= set(lost)
            self._changed.notify_all()

    def settle(self) -> frozenset[int]:
        with self._changed:
            self.held = set(self.wanted)
            self._changed.notify_all()
            return self.wanted

    def refill(self) -> frozenset[int]:
        deadline = time.monotonic() + self._patience
        with self._changed:
            while not self.wanted and not self.job.is_cancelled and time.monotonic() < deadline and self._may_come():
                self._changed.wait(TEND_SECONDS)
            return self.wanted


class Scheduler:
    """Decodes what is submitted, in order of arrival. Use it in a `with` block.

    The policy says on how many replicas each request runs: `latency`: on all, one request after another; `throughput`:
    on one; `fair`: all replicas are divided among the requests that are there, a request alone has them all. Running
    requests are moved between two steps; no output depends on it. With one replica, and under torchrun, requests run
    one after another whatever the policy is.

    Args:
        runtime: whose replicas are used; nobody else must use it meanwhile.
        max_waiting: requests that may wait for others to end, >= 0.
        policy: one of SCHEDULES.

    Attributes:
        totals: what it has done.
    """

    def __init__(self, runtime: LookaheadRuntime, max_waiting: int = 64, policy: str = "fair"):
        require_choice("policy", policy, SCHEDULES)
        self.totals = Totals()
        self._runtime = runtime
        self._launcher = runtime.launcher
        self._max_waiting = max_waiting
        self._policy = policy
        self._patience = runtime.config.launcher.start_timeout
        self._waiting: deque[Job] = deque()
        self._running: list[_Share] = []
        self._changed = threading.Condition(threading.RLock())
        self._is_closed = False
        self._threads: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._work, name="lp-scheduler", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether any replica is there."""
        return self._launcher.num_ready > 0

    @property
    def max_waiting(self) -> int:
        return self._max_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def degrees(self) -> list[int]:
        """LP degree of every running request."""
        with self._changed:
            return [len(share.wanted) for share in self._running]

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
            num_free = max(0, self._most_running() - len(self._running))
            if len(self._waiting) + len(jobs) > self._max_waiting + num_free:
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
            for job in (*self._waiting, *(share.job for share in self._running)):
                job.cancel()
            self._changed.notify_all()
        self._thread.join()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _any_may_come(self) -> bool:
        """Whether a replica is there, or is being started."""
        launcher = self._launcher  # asked twice: one may come up between two looks
        return launcher.num_ready > 0 or launcher.num_loading > 0 or launcher.num_ready > 0

    def _most_running(self) -> int:
        """Requests that may run at once."""
        ready = self._launcher.ready
        return 1 if ready is None or self._policy == "latency" else max(1, len(ready))

    def _work(self) -> None:
        with self._changed:
            while not (self._is_closed and not self._waiting):
                self._drop_dead()
                self._divide()
                self._changed.wait(TEND_SECONDS)

    def _drop_dead(self) -> None:
        """Take out what need not run any more."""
        now = time.monotonic()
        for job in list(self._waiting):
            if job.is_cancelled:
                outcome, error = "cancelled", ReplicaError("the request was cancelled before it began")
            elif job.deadline is not None and now > job.deadline:
                outcome, error = "expired", DeadlineError("the request has waited for too long")
            else:
                continue
            self._waiting.remove(job)
            self.totals.count(outcome)
            job.put(error)

    def _divide(self) -> None:
        """Start what can be started, and divide the replicas among what runs."""
        ready = self._launcher.ready
        if ready is None:
            if self._waiting and not self._running:
                self._begin(self._waiting.popleft(), None)
            return
        num_jobs = min(len(self._running) + len(self._waiting), self._most_running())
        if not ready and not self._any_may_come():
            while self._waiting:
                self.totals.count("failed")
                self._waiting.popleft().put(ReplicaError("no replica is left"))
        if not num_jobs or not ready:
            return
        goals = _goals(len(ready), num_jobs, self._policy)
        free = sorted(ready - {index for share in self._running for index in share.held})
        for share, goal in zip(self._running, goals, strict=False):
            kept = share.wanted & ready
            if len(kept) > goal:
                share.wanted = frozenset(sorted(kept)[:goal])  # rank 0 stays
            elif not kept and free:
                share.take([free.pop(0)])  # it has lost all it had
                self._changed.notify_all()
        while free and len(self._running) < num_jobs:
            goal = goals[len(self._running)]
            self._begin(self._waiting.popleft(), free[:goal])
            del free[:goal]
        if self._waiting or len(self._running) < num_jobs:
            return
        for share, goal in zip(self._running, goals, strict=False):  # more run than there are replicas, after a loss
            num_left = share.job.request.max_new_tokens - share.num_told
            if len(share.wanted) < goal and free and share.num_told and num_left >= WORTH_MOVING:
                more = free[: goal - len(share.wanted)]
                share.take(more)
                del free[: len(more)]

    def _begin(self, job: Job, members: list[int] | None) -> None:
        share = _Share(job, members or (), self._changed, self._patience, self._any_may_come)
        self._running.append(share)
        thread = threading.Thread(target=self._decode, args=(share, members is not None), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _decode(self, share: _Share, is_shared: bool) -> None:
        job = share.job
        item: Generation | LookaheadError
        try:
            with unforeseen_as(ReplicaError, "the request failed"):
                stream = self._runtime.stream_request(job.request, allotment=share if is_shared else None)
                for piece in stream:
                    share.num_told += len(piece.token_ids)
                    job.put(piece)
                    if job.is_cancelled:
                        break
                if stream.generation is None:
                    stream.close()
                    item, outcome = ReplicaError("the request was cancelled"), "cancelled"
                else:
                    item, outcome = stream.generation, stream.generation.finish_reason
        except LookaheadError as error:
            item, outcome = error, "failed"
        with self._changed:
            self.totals.count(outcome)
            if isinstance(item, Generation):
                self.totals.add(job.request, item)
            self._running.remove(share)
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()
        job.put(item)


def _goals(num_replicas: int, num_jobs: int, policy: str) -> list[int]:
    """How many replicas each of some requests should have."""
    if policy == "latency":
        return [num_replicas]
    if policy == "throughput":
        return [1] * num_jobs
    least, num_more = divmod(num_replicas, num_jobs)
    return [least + (number < num_more) for number in range(num_jobs)]
