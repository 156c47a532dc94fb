"""Runs jobs, each in a thread that drives its request on the replicas of its lease."""

from __future__ import annotations

import threading

from lp_runtime.errors import LookaheadError, ReplicaError, first_line, unforeseen_as
from lp_runtime.request.generation import Generation
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job, JobLease, Totals
from lp_runtime.scheduler.lp_degree import DegreeSpeeds, SpeedMeter

CANCELLED = "the request was cancelled"


class JobRunner:
    """Begins jobs, delivers their deltas and ends them."""

    def __init__(
        self,
        runtime: LookaheadRuntime,
        changed: threading.Condition,
        running: list[JobLease],
        totals: Totals,
        speeds: DegreeSpeeds,
    ):
        self._runtime = runtime
        self._changed = changed  # the scheduler's condition, which guards leases and totals
        self._running = running  # leases of the running jobs; appended when a job begins, removed when it ends
        self._totals = totals
        self._speeds = speeds  # receives the measured speed of jobs that run alone
        self._threads: set[threading.Thread] = set()

    def begin(self, job: Job, members: list[int] | None) -> None:
        """Start a waiting job's thread. The caller holds the scheduler's condition.

        `members` are the indices of its replicas; None if the launcher runs one job at a time, on all replicas.
        """
        seconds, launcher = self._runtime.config.launcher.start_timeout, self._runtime.launcher
        replicas = range(launcher.num_replicas) if members is None else members
        lease = JobLease(job, replicas, self._changed, seconds, lambda: launcher.has_replicas)
        if members is None:
            lease.current = lease.wanted
        self._running.append(lease)
        job.begin()
        thread = threading.Thread(target=self._decode, args=(lease, members is not None), daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system's thread limit
            self._end(lease, thread, ReplicaError(f"the request could not be started: {first_line(error)}"), "failed")

    def join(self) -> None:
        for thread in list(self._threads):
            thread.join()

    def _decode(self, lease: JobLease, is_leased: bool) -> None:
        """Decode a job's request and deliver its deltas; the main function of its thread."""
        job = lease.job
        outcome: Generation | LookaheadError
        meter = SpeedMeter(self._speeds)
        try:
            with unforeseen_as(ReplicaError, "the request failed"):
                stream = self._runtime.stream_request(
                    job.request, lease=lease if is_leased else None, should_cancel=lambda: job.is_cancelled
                )
                for delta in stream:
                    with self._changed:
                        lease.num_delivered += len(delta.token_ids)
                        self._totals.add_step(len(delta.token_ids))
                        meter.record_step(lease.current, len(self._running), len(delta.token_ids))
                    job.deliver(delta)
                    if job.is_cancelled:
                        break
                generation = stream.generation
                if generation is None or (job.is_cancelled and generation.finish_reason == "cancelled"):
                    stream.close()
                    outcome, ending = ReplicaError(CANCELLED), "cancelled"
                else:
                    outcome, ending = generation, generation.finish_reason
        except LookaheadError as error:
            outcome, ending = (ReplicaError(CANCELLED), "cancelled") if job.is_cancelled else (error, "failed")
        self._end(lease, threading.current_thread(), outcome, ending)

    def _end(
        self, lease: JobLease, thread: threading.Thread, outcome: Generation | LookaheadError, ending: str
    ) -> None:
        with self._changed:
            # Update the totals first: a thread that sees, without the lock, no running job finds all jobs counted.
            self._totals.count(ending)
            if isinstance(outcome, Generation):
                self._totals.add(lease.job.request, outcome)
            self._running.remove(lease)
            self._threads.discard(thread)
            self._changed.notify_all()
        lease.job.finish(outcome)
