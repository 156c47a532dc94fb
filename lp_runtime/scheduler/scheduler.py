"""Scheduler for many requests on one runtime: a bounded queue, and replica allocation.

One thread allocates. Every running job has its own thread (job_runner.py). The submitter of a job reads its deltas from
a queue.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Unpack

from lp_runtime.config.checks import plain, require_choice, require_int
from lp_runtime.config.serving import MAX_BATCH, SCHEDULING_POLICIES
from lp_runtime.errors import BusyError, ConfigError, DeadlineError, LookaheadError, ReplicaError
from lp_runtime.request.generation import Delta, Generation
from lp_runtime.request.request import Request
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.allocation import Allocator
from lp_runtime.scheduler.job import CHECK_SECONDS, Job, JobLease, Totals
from lp_runtime.scheduler.job_runner import JobRunner
from lp_runtime.utils.owner import OwnerProcess

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130  # of a process that Ctrl-C ends at once
RETRY_SECONDS = 0.05  # between attempts to submit while the queue is full; short compared with a request


class Scheduler:
    """Decodes requests in order of arrival. Use it in a `with` block.

    The policy decides how many replicas each request gets. `latency`: all, one request after another. `throughput`:
    one. `fair`: the replicas are divided among the running requests; a request that runs alone gets all of them, or the
    number that was measured to be fastest. If there are more requests than replicas, a replica decodes several in one
    forward pass, except with `latency`. Running requests move to other replicas between two steps, which does not
    change their output. Under torchrun, and with one replica in this process, requests run one after another with every
    policy.

    Args:
        runtime: must not be used otherwise while the scheduler is open.
        max_waiting: largest number of requests in the queue, >= 0.
        policy: one of SCHEDULING_POLICIES.
        max_batch: largest number of requests that a replica decodes in one forward pass, >= 1.

    Attributes:
        totals: sums over all jobs so far.
        max_waiting: largest number of requests in the queue.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        runtime: LookaheadRuntime,
        max_waiting: int = 64,
        policy: str = "fair",
        max_batch: int = MAX_BATCH,
    ):
        require_choice("policy", policy, SCHEDULING_POLICIES)
        max_waiting, max_batch = plain(max_waiting), plain(max_batch)
        require_int("max_waiting", max_waiting, 0)
        require_int("max_batch", max_batch, 1)
        self.totals = Totals()
        self._owner = OwnerProcess()
        self._runtime = runtime
        self._launcher = runtime.launcher
        self.max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: list[JobLease] = []
        self._allocator = Allocator(self._launcher, self._running, policy, max_batch)
        self._changed = threading.Condition(threading.RLock())
        self._runner = JobRunner(runtime, self._changed, self._running, self.totals, self._allocator.speeds)
        self._is_closed = False
        update = weakref.WeakMethod(self._update)  # only its user and its jobs keep a scheduler alive
        self._thread = threading.Thread(target=_work, args=(update, self._changed), name="lp-scheduler", daemon=True)
        self._thread.start()
        self._at_exit = partial(_call, weakref.WeakMethod(self._close_at_exit))
        atexit.register(self._at_exit)

    @property
    def is_healthy(self) -> bool:
        """Whether any replica is up."""
        return self._launcher.num_ready > 0

    @property
    def has_replicas(self) -> bool:
        """Whether any replica is up or being started; if not, this scheduler can decode nothing any more."""
        return self._launcher.has_replicas

    @property
    def why_lost(self) -> str:
        """Reasons of the replicas' losses in one line; empty if none was lost."""
        return self._launcher.why_lost

    @property
    def max_jobs(self) -> int:
        """Largest number of requests, running and waiting, if all replicas are up."""
        launcher = self._launcher
        replicas = None if launcher.ready is None else range(launcher.num_replicas)
        return self.max_waiting + self._allocator.max_running(replicas)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that are being decoded."""
        return len(self._running)

    @property
    def degrees(self) -> list[int]:
        """LP degree of every running request."""
        with self._changed:
            return [len(lease.wanted) for lease in self._running]

    @property
    def batches(self) -> list[int]:
        """Number of requests on each replica that has any, in the order of the replica indices."""
        with self._changed:
            used = [index for lease in self._running for index in lease.wanted]
            return [used.count(index) for index in sorted(set(used))]

    def replicas_of(self, job: Job) -> frozenset[int]:
        """Return the indices of the replicas that a job should run on; empty unless the job is running."""
        with self._changed:
            return next((lease.wanted for lease in self._running if lease.job is job), frozenset())

    # Submitting.

    def submit(self, request: Request, timeout: float | None = None, gpus: int | None = None) -> Job:
        """Put a request at the end of the queue.

        Args:
            request: as returned by `LookaheadRuntime.request`.
            timeout: seconds within which decoding must begin; None for no limit.
            gpus: largest number of GPUs for the request; with `throughput`, the number it gets if they are free. None
                leaves it to the policy.

        Raises:
            BusyError: too many requests are waiting.
            ConfigError: the runtime has fewer than `gpus` GPUs, or `gpus` is not a multiple of gpus_per_replica.
            ReplicaError: the scheduler is closed, or belongs to the process from which this one was forked.
        """
        return self.submit_all([request], timeout, gpus)[0]

    def _num_replicas_on(self, gpus: int) -> int:
        """Convert a number of GPUs to a number of replicas; raise ConfigError if that is not possible."""
        gpus = plain(gpus)
        require_int("gpus", gpus, 1)
        each, num_replicas = self._launcher.gpus_per_replica, self._launcher.num_replicas
        if gpus > num_replicas * each:
            what = "the number of replicas" if each == 1 else "the number of GPUs"
            raise ConfigError(f"gpus={gpus}: must be at most {num_replicas * each}, {what}")
        if gpus % each:
            raise ConfigError(f"gpus={gpus}: must be a multiple of gpus_per_replica={each}")
        return gpus // each

    def submit_all(
        self, requests: Sequence[Request], timeout: float | None = None, gpus: int | None = None
    ) -> list[Job]:
        """Put several requests at the end of the queue, or none if the queue cannot hold all of them.

        Arguments and errors are as in `submit`, for each request.
        """
        self._owner.check("the scheduler")
        max_replicas = None if gpus is None else self._num_replicas_on(gpus)
        deadline = None if timeout is None else time.monotonic() + timeout
        jobs = [Job(request, deadline, max_replicas, scheduler=self) for request in requests]
        with self._changed:
            if self._is_closed:
                raise ReplicaError("the scheduler is closed")
            num_free = max(0, self._allocator.max_running(self._launcher.ready) - len(self._running))
            if len(self._waiting) + len(jobs) > self.max_waiting + num_free:
                raise BusyError(
                    f"busy: {len(self._waiting)} requests are waiting, and at most {self.max_waiting} may; try later"
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()
        return jobs

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int | None = None, **options: Unpack[RequestOptions]
    ) -> Job:
        """Submit a prompt. Iterate over the job, or, in asyncio, over its `deltas()`.

        Arguments are those of `LookaheadRuntime.generate`; errors are those of `LookaheadRuntime.request` and `submit`.
        """
        return self.submit(self._runtime.request(prompt, max_new_tokens, **options))

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Decode prompts, as many at once as the policy allows, and return the results in the prompts' order.

        The other arguments are those of `LookaheadRuntime.generate`. Raises the first LookaheadError of any request;
        the other requests are cancelled.
        """
        jobs: list[Job] = []
        try:
            for request in self._requests(prompts, max_new_tokens, options):
                while not (job := self._try_submit(request)):
                    time.sleep(RETRY_SECONDS)
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
        """Decode prompts in asyncio, as `generate_many` does. Cancelling the coroutine cancels all requests."""
        jobs: list[Job] = []
        try:
            for request in await asyncio.to_thread(self._requests, prompts, max_new_tokens, options):
                while not (job := self._try_submit(request)):
                    await asyncio.sleep(RETRY_SECONDS)
                jobs.append(job)
            for job in jobs:
                async for _ in job.deltas():
                    pass
            return [job.final_generation for job in jobs]
        except BaseException:
            _cancel(jobs)
            raise

    async def stream_async(
        self, prompt: str | Sequence[int], max_new_tokens: int | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Delta]:
        """Submit a prompt as `stream` does; yield its deltas in asyncio. An early end cancels the request."""
        request = await asyncio.to_thread(partial(self._runtime.request, prompt, max_new_tokens, **options))
        job = self.submit(request)
        async with contextlib.aclosing(job.deltas()) as deltas:
            async for delta in deltas:
                yield delta

    def _requests(
        self, prompts: Iterable[str | Sequence[int]], max_new_tokens: int | None, options: RequestOptions
    ) -> list[Request]:
        return [self._runtime.request(prompt, max_new_tokens, **options) for prompt in prompts]

    def _try_submit(self, request: Request) -> Job | None:
        try:
            return self.submit(request)
        except BusyError:
            return None

    def close(self) -> None:
        """Cancel all requests, and wait until all of them have ended. No effect in a forked process."""
        if not self._owner.is_current:
            return
        with self._changed:
            self._is_closed = True
            _cancel((*self._waiting, *(lease.job for lease in self._running)))
            self._changed.notify_all()
        self._thread.join()
        self._runner.join()
        atexit.unregister(self._at_exit)

    def _close_at_exit(self) -> None:
        """Close a scheduler that was left open, or whose `close` was interrupted.

        Python would end the threads inside a forward pass, which makes C++ abort the process.
        """
        try:
            self.close()
        except KeyboardInterrupt:
            os._exit(EXIT_INTERRUPTED)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Running.

    def _update(self) -> bool:
        """Allocate replicas after jobs or replicas have changed; return False at the end."""
        if self._is_closed and not self._waiting:
            return False
        try:
            self._drop_ended()
            self._allocate()
        except Exception:  # keep the thread alive: without it no job would begin any more
            log.exception("allocating replicas failed; trying again")
        return True

    def _drop_ended(self) -> None:
        now = time.monotonic()
        error: LookaheadError
        for job in list(self._waiting):
            if job.is_cancelled:
                ending, error = "cancelled", ReplicaError("the request was cancelled before it began")
            elif job.deadline is not None and now > job.deadline:
                ending, error = "expired", DeadlineError("the request did not begin before its deadline")
            else:
                continue
            self._waiting.remove(job)
            self.totals.count(ending)
            job.finish(error)

    def _allocate(self) -> None:
        """Allocate the ready replicas to the running jobs, and begin waiting jobs that get some."""
        ready = self._launcher.ready
        if ready is None:
            if self._waiting and not self._running:
                self._runner.begin(self._waiting.popleft(), None)
            return
        if not ready and not self._launcher.has_replicas:
            while self._waiting:
                self.totals.count("failed")
                self._waiting.popleft().finish(ReplicaError("no replica is left"))
        if not ready:
            return
        for job, members in self._allocator.allocate(ready, self._waiting):
            self._waiting.remove(job)
            self._runner.begin(job, members)
        self._changed.notify_all()  # wakes `refill` of a job that had lost all its replicas


def _work(update: weakref.WeakMethod[Callable[[], bool]], changed: threading.Condition) -> None:
    """Call a scheduler's `_update` after each change, until the scheduler is closed or has been collected."""
    with changed:
        while (bound := update()) is not None and bound():
            del bound
            changed.wait(CHECK_SECONDS)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()


def _cancel(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.cancel()
