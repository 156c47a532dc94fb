"""Requests that are held after their first delta, so that they cannot end while a test checks them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

from lp_runtime import Delta, Generation, GenerationStream, Job, LookaheadRuntime, RequestOptions, Scheduler
from lp_runtime.request.request import Request

POLL_SECONDS = 0.02  # between checks whether a held job was cancelled


class HeldRuntime:
    """A runtime for a scheduler; requests that come through `submit` are held after their first delta.

    To the scheduler, a held job is running: it keeps its replicas, does not move to others, and reads no more of their
    output. It continues when the test releases or cancels it, or when the scheduler is closed.

    Args:
        runtime: decodes the requests.
    """

    def __init__(self, runtime: LookaheadRuntime):
        self.config = runtime.config
        self.launcher = runtime.launcher
        self._runtime = runtime
        self._changed = threading.Condition()
        self._held: dict[int, Job | None] = {}  # by the request's id; None until it is submitted

    def submit(self, scheduler: Scheduler, request: Request, gpus: int | None = None) -> Job:
        """Submit a request that is to be held; arguments as `Scheduler.submit`."""
        return self.submit_all(scheduler, [request], gpus)[0]

    def submit_all(self, scheduler: Scheduler, requests: Sequence[Request], gpus: int | None = None) -> list[Job]:
        """Submit requests that are to be held, all at once; arguments as `Scheduler.submit_all`."""
        with self._changed:
            self._held |= {id(request): None for request in requests}
        jobs = scheduler.submit_all(requests, gpus=gpus)
        with self._changed:
            self._held |= {id(job.request): job for job in jobs}
        return jobs

    def release(self, *jobs: Job) -> None:
        """Let held jobs continue."""
        with self._changed:
            for job in jobs:
                del self._held[id(job.request)]
            self._changed.notify_all()

    def request(
        self, prompt: str | Sequence[int], max_new_tokens: int | None = None, **options: Unpack[RequestOptions]
    ) -> Request:
        """Return a checked request."""
        return self._runtime.request(prompt, max_new_tokens, **options)

    def stream_request(self, request: Request, **options: Any) -> HeldStream:
        """Decode a request; the stream waits after its first delta while the request is held."""
        return HeldStream(self._runtime.stream_request(request, **options), lambda: self._wait(request))

    def _wait(self, request: Request) -> None:
        with self._changed:
            while id(request) in self._held:
                job = self._held[id(request)]
                if job is not None and job.is_cancelled:
                    return
                self._changed.wait(POLL_SECONDS)


class HeldStream:
    """A stream of deltas that waits after the first one.

    Args:
        stream: the deltas.
        wait: returns when the stream may continue.
    """

    def __init__(self, stream: GenerationStream, wait: Callable[[], None]):
        self._stream = stream
        self._wait = wait

    @property
    def generation(self) -> Generation | None:
        """The result, once the iteration has ended."""
        return self._stream.generation

    def close(self) -> None:
        """Cancel what is left of the request."""
        self._stream.close()

    def __iter__(self) -> Iterator[Delta]:
        for number, delta in enumerate(self._stream):
            yield delta
            if number == 0:
                self._wait()


def first_delta(job: Job) -> list[int]:
    """Wait for a job's first delta; return its token ids."""
    return list(next(iter(job)).token_ids)
