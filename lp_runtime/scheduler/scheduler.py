"""Many requests on one runtime: a bounded queue, and the replicas divided among what runs.

A thread divides; every running request has one of its own; whoever has submitted it reads its pieces from a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Unpack

from lp_runtime.config.checks import require_choice, require_int
from lp_runtime.config.commands import MAX_BATCH, SCHEDULING_POLICIES
from lp_runtime.engine.generation import Delta, Generation
from lp_runtime.engine.request import Request
from lp_runtime.engine.request_builder import RequestOptions
from lp_runtime.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    LookaheadError,
    ReplicaError,
    first_line,
    unforeseen_as,
)
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.allocation import Allocator
from lp_runtime.scheduler.job import TEND_SECONDS, Job, Share, Totals
from lp_runtime.scheduler.lp_degree import STEPS_SKIPPED, DegreeSpeeds

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.05  # between attempts to submit where too many wait


class Scheduler:
    """Decodes what is submitted, in order of arrival. Use it in a `with` block.

    The policy says on how many replicas each request runs: `latency`: on all, one request after another; `throughput`:
    on one; `fair`: all replicas are divided among the requests that are there; a request alone has all of them, or as
    many as have turned out to be fastest. Where there are more requests than replicas, a replica decodes several in one
    forward pass, but with `latency`. Running requests are moved between two steps; no output depends on it. Under
    torchrun, and on one replica in this process, requests run one after another whatever the policy is.

    Args:
        runtime: whose replicas are used; nobody else must use it meanwhile.
        max_waiting: requests that may wait for others to end, >= 0.
        policy: one of SCHEDULING_POLICIES.
        max_batch: requests that a replica decodes in one forward pass at most, >= 1.

    Attributes:
        totals: what it has done.
    """

    def __init__(
        self,
        runtime: LookaheadRuntime,
        max_waiting: int = 64,
        policy: str = "fair",
        max_batch: int = MAX_BATCH,
    ):
        require_choice("policy", policy, SCHEDULING_POLICIES)
        require_int("max_waiting", max_waiting, 0)
        require_int("max_batch", max_batch, 1)
        self.totals = Totals()
        self._runtime = runtime
        self._launcher = runtime.launcher
        self._max_waiting = max_waiting
        self._patience = runtime.config.launcher.start_timeout
        self._waiting: deque[Job] = deque()
        self._running: list[Share] = []
        self._division = Allocator(self._launcher, self._running, policy, max_batch)
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

    @property
    def batches(self) -> list[int]:
        """How many requests are on each replica that has any."""
        with self._changed:
            held = [index for share in self._running for index in share.wanted]
            return [held.count(index) for index in sorted(set(held))]

    # Submitting.

    def submit(self, request: Request, timeout: float | None = None, gpus: int | None = None) -> Job:
        """Put a request at the end of the queue.

        Args:
            request: as `LookaheadRuntime.request` makes one.
            timeout: seconds within which it must have begun; None for no limit.
            gpus: replicas that it may have at most, and, with `throughput`, is to have; None as the policy says.

        Raises:
            BusyError: if too many are waiting already.
            ConfigError: if there are not so many replicas.
            ReplicaError: if the scheduler is closed.
        """
        return self.submit_all([request], timeout, gpus)[0]

    def submit_all(
        self, requests: Sequence[Request], timeout: float | None = None, gpus: int | None = None
    ) -> list[Job]:
        """Put requests at the end of the queue, all of them or none. See `submit`."""
        if gpus is not None:
            require_int("gpus", gpus, 1)
            if gpus > self._launcher.num_replicas:
                raise ConfigError(f"gpus={gpus}: must be at most {self._launcher.num_replicas}, the number of replicas")
        deadline = None if timeout is None else time.monotonic() + timeout
        jobs = [Job(request, deadline, gpus) for request in requests]
        with self._changed:
            if self._is_closed:
                raise ReplicaError("the scheduler is closed")
            num_free = max(0, self._division.most_on(self._launcher.ready) - len(self._running))
            if len(self._waiting) + len(jobs) > self._max_waiting + num_free:
                raise BusyError(
                    f"busy: {len(self._waiting)} requests are waiting, and at most {self._max_waiting} may; try later"
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()
        return jobs

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int | None = None, **options: Unpack[RequestOptions]
    ) -> Job:
        """Submit a prompt. Iterate over the job, or, in asyncio, over its `pieces()`.

        Raises:
            LookaheadError: as `LookaheadRuntime.request` and `submit` do.
        """
        return self.submit(self._runtime.request(prompt, max_new_tokens, **options))

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Decode prompts, as many at once as can be; returns what came of each, in their order.

        Raises:
            LookaheadError: the first that any of them raises; the others are cancelled then.
        """
        jobs: list[Job] = []
        try:
            for request in self._requests(prompts, max_new_tokens, options):
                while not (job := self._try(request)):
                    time.sleep(BUSY_SECONDS)
                jobs.append(job)
            return [job.result() for job in jobs]
        except BaseException:
            _cancel(jobs)
            raise

    async def generate_many_async(
        self,
        prompts: Iterable[str | Sequence[int]],
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """The same in asyncio; cancelling it cancels them all."""
        jobs: list[Job] = []
        try:
            for request in self._requests(prompts, max_new_tokens, options):
                while not (job := self._try(request)):
                    await asyncio.sleep(BUSY_SECONDS)
                jobs.append(job)
            for job in jobs:
                async for _ in job.pieces():
                    pass
            return [job.generation for job in jobs]
        except BaseException:
            _cancel(jobs)
            raise

    async def stream_async(
        self, prompt: str | Sequence[int], max_new_tokens: int | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Delta]:
        """Submit a prompt and yield its pieces, in asyncio; ending the iteration early cancels it."""
        job = self.stream(prompt, max_new_tokens, **options)
        async with contextlib.aclosing(job.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    def _requests(self, prompts: Iterable, max_new_tokens: int | None, options: RequestOptions) -> list[Request]:
        return [self._runtime.request(prompt, max_new_tokens, **options) for prompt in prompts]

    def _try(self, request: Request) -> Job | None:
        """Submit it; None if too many wait."""
        try:
            return self.submit(request)
        except BusyError:
            return None

    def close(self) -> None:
        """Cancel everything, and wait until the replicas are free."""
        with self._changed:
            self._is_closed = True
            _cancel((*self._waiting, *(share.job for share in self._running)))
            self._changed.notify_all()
        self._thread.join()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # Running.

    def _any_may_come(self) -> bool:
        """Whether a replica is there, or is being started."""
        launcher = self._launcher  # asked twice: one may come up between two looks
        return launcher.num_ready > 0 or launcher.num_loading > 0 or launcher.num_ready > 0

    @property
    def most_at_once(self) -> int:
        """Requests that can be here at once, running and waiting, when all replicas are there."""
        launcher = self._launcher
        everything = None if launcher.ready is None else range(launcher.num_replicas)
        return self._max_waiting + self._division.most_on(everything)

    def _work(self) -> None:
        with self._changed:
            while not (self._is_closed and not self._waiting):
                try:
                    self._drop_dead()
                    self._divide()
                except Exception:  # without this thread nothing goes on
                    log.exception("dividing replicas failed; going on")
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
        if not ready and not self._any_may_come():
            while self._waiting:
                self.totals.count("failed")
                self._waiting.popleft().put(ReplicaError("no replica is left"))
        if not ready:
            return
        for job, members in self._division.divide(ready, self._waiting):
            self._waiting.remove(job)
            self._begin(job, members)
        self._changed.notify_all()  # who had lost all replicas may have others

    def _begin(self, job: Job, members: list[int] | None) -> None:
        share = Share(job, members or (), self._changed, self._patience, self._any_may_come)
        self._running.append(share)
        thread = threading.Thread(target=self._decode, args=(share, members is not None), daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more of them
            self._end(share, thread, ReplicaError(f"the request could not be started: {first_line(error)}"), "failed")

    def _decode(self, share: Share, is_shared: bool) -> None:
        job = share.job
        item: Generation | LookaheadError
        stopwatch = _Stopwatch(self._division.speeds)
        try:
            with unforeseen_as(ReplicaError, "the request failed"):
                stream = self._runtime.stream_request(job.request, lease=share if is_shared else None)
                for piece in stream:
                    with self._changed:
                        share.num_told += len(piece.token_ids)
                        stopwatch.note(share.current, len(self._running), len(piece.token_ids))
                    job.put(piece)
                    if job.is_cancelled:
                        break
                done = stream.generation
                if done is None or (job.is_cancelled and done.finish_reason == "cancelled"):
                    stream.close()
                    item, outcome = ReplicaError("the request was cancelled"), "cancelled"
                else:
                    item, outcome = done, done.finish_reason
        except LookaheadError as error:
            item, outcome = error, "failed"
        self._end(share, threading.current_thread(), item, outcome)

    def _end(self, share: Share, thread: threading.Thread, item: Generation | LookaheadError, outcome: str) -> None:
        with self._changed:
            self._running.remove(share)
            self._threads.discard(thread)
            self._changed.notify_all()
            self.totals.count(outcome)
            if isinstance(item, Generation):
                self.totals.add(share.job.request, item)
        share.job.put(item)


class _Stopwatch:
    """Tells how fast a request is on its replicas while it is the only one."""

    def __init__(self, speeds: DegreeSpeeds):
        self._speeds = speeds
        self._members: frozenset[int] | None = None
        self._num_steps = 0  # on these
        self._last = 0.0

    def note(self, members: frozenset[int], num_running: int, num_tokens: int) -> None:
        """A step of a request has ended."""
        now = time.monotonic()
        self._num_steps = self._num_steps + 1 if members == self._members and num_running == 1 else 0
        if self._num_steps > STEPS_SKIPPED:
            self._speeds.note(len(members), num_tokens, now - self._last)
        self._members, self._last = members, now


def _cancel(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.cancel()
