"""Answers: turns the deltas of an answer's jobs into an HTTP response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lp_runtime.errors import LookaheadError
from lp_runtime.request.generation import Delta
from lp_runtime.scheduler.job import Job, JobState
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.openai.choice import Choice
from lp_runtime.server.openai.common import Common
from lp_runtime.server.openai.forms import Form
from lp_runtime.server.tracing import Tracing
from lp_runtime.utils.json_line import to_json

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between checks whether a client is still connected
PING_SECONDS = 10.0  # between events that keep a stream open while there is no text
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies, nginx among them, pass events on

T = TypeVar("T")
Item = tuple[Choice, Delta | Exception | None, float]  # a delta or the end of a choice, at a time.perf_counter()


class EventStream(StreamingResponse):
    """A streamed answer that calls `on_end` when its sending ends, also if that is because the client has gone.

    A send waits for a client that reads slowly. If that client leaves, the send is cancelled, and the generator of
    events, which is not running then, would end only when Python's garbage collector finds it.
    """

    def __init__(self, events: AsyncGenerator[str, None], on_end: Callable[[], None]):
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            await self._events.aclose()


class Answers:
    """The answers that the server writes. It keeps `running`, the jobs of unfinished ones, up to date."""

    def __init__(
        self, metrics: Metrics, running: set[Job], tracing: Tracing | None = None, ping_seconds: float = PING_SECONDS
    ):
        self._metrics, self._running = metrics, running
        self._tracing, self._ping_seconds = tracing, ping_seconds

    def add(self, choices: list[Choice]) -> None:
        self._running.update(choice.job for choice in choices)

    def abort(self, error: LookaheadError) -> None:
        """End every running answer now: clients receive the text so far and the error."""
        for job in list(self._running):
            job.abort(error)

    async def respond(self, body: Common, request: Request, choices: list[Choice], form: Form) -> Response:
        """Build the HTTP response: a stream of events, or one JSON body once all choices have ended."""
        texts = self._texts(choices, request.state.arrived)
        if self._tracing is not None:
            texts = self._tracing.traced(texts, request, body, choices)
        if body.stream:
            first: asyncio.Future[Any] = asyncio.ensure_future(anext(texts))
            if choices[0].job.deadline is not None:  # a request that waits too long gets an HTTP status, not an event
                await self._wait(first, request, choices, lambda: any(map(_is_running, choices)))
            events = self.events(_with_waits(first, texts, self._ping_seconds), choices, form)
            return EventStream(events, lambda: self._close(choices))

        async def collect() -> None:
            parts: dict[int, list[str]] = {choice.index: [] for choice in choices}
            async for choice, text in texts:
                parts[choice.index].append(text)
            for choice in choices:
                choice.text = "".join(parts[choice.index])

        await self._wait(asyncio.ensure_future(collect()), request, choices)
        return Response(to_json(form.whole(choices)), media_type="application/json")

    async def _wait(
        self,
        task: asyncio.Future[Any],
        request: Request,
        choices: list[Choice],
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until a task has ended, and raise its error, or until `is_enough`; end all if the client disconnects."""
        try:
            while not task.done() and not is_enough():
                if not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0] and await request.is_disconnected():
                    raise ApiError(499, "the client has disconnected")
            if task.done():
                task.result()
        except BaseException:
            task.cancel()
            self._close(choices)
            raise

    async def _texts(self, choices: list[Choice], arrived: float) -> AsyncGenerator[tuple[Choice, str], None]:
        """Yield (choice, text to show) for every delta as it comes, and for the end of each choice.

        If a job fails or the iteration ends early, all jobs are cancelled. `arrived` is the request's arrival by
        time.perf_counter().
        """
        items: asyncio.Queue[Item] = asyncio.Queue()
        readers = [asyncio.ensure_future(_read(choice, items)) for choice in choices]
        latest: dict[int, float] = {}  # arrival of a choice's last delta, by its index
        num_running = len(choices)
        try:
            while num_running:
                choice, item, now = await items.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                    if choice.job.queue_seconds is not None:
                        self._metrics.queue.observe(choice.job.queue_seconds)
                    yield choice, choice.finish()
                    continue
                if not latest:
                    self._metrics.first_token.observe(now - arrived)
                elif choice.index in latest and item.token_ids:
                    self._metrics.inter_token.observe((now - latest[choice.index]) / len(item.token_ids))
                latest[choice.index] = now
                yield choice, choice.add(item)
            self._metrics.whole.observe(time.perf_counter() - arrived)
        finally:
            for reader in readers:
                reader.cancel()
            self._close(choices)

    def _close(self, choices: list[Choice]) -> None:
        for choice in choices:
            choice.job.cancel()  # no effect on a job that has ended
            self._running.discard(choice.job)

    async def events(
        self, texts: AsyncIterator[tuple[Choice, str] | None], choices: list[Choice], form: Form
    ) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events; None among `texts` and an error become events, too."""
        try:
            for each in form.opening(choices):
                yield each
            async for grown in texts:
                for each in (form.waiting(),) if grown is None else _grown(form, *grown):
                    yield each
            for each in form.closing(choices):
                yield each
        except Exception as error:  # the HTTP status has already been sent
            if not isinstance(error, LookaheadError):
                log.error("an answer has failed", exc_info=error)
            for each in form.failure(ApiError.of(error)):
                yield each


async def _read(choice: Choice, items: asyncio.Queue[Item]) -> None:
    """Put the deltas of a choice's job into a queue as they come; at last None, or the job's error."""
    end = None
    try:
        async for delta in choice.job.deltas():
            items.put_nowait((choice, delta, time.perf_counter()))
    except Exception as error:
        end = error
    items.put_nowait((choice, end, time.perf_counter()))


def _grown(form: Form, choice: Choice, text: str) -> Iterator[str]:
    """Yield the events for new text of a choice, for its end, and for new tokens if the request asks for them."""
    new = slice(choice.num_shown, choice.num_final)
    choice.num_shown = choice.num_final
    request, has_tokens = choice.job.request, new.start < new.stop
    if text or choice.reason or (has_tokens and (request.logprobs or request.trace)):
        yield from form.grown(choice, text, new)


def _is_running(choice: Choice) -> bool:
    return choice.job.state is JobState.RUNNING


async def _with_waits(task: asyncio.Future[T], items: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """Yield the result of a task and further items, and None whenever none has come for some seconds."""
    try:
        while True:
            if not (await asyncio.wait({task}, timeout=seconds))[0]:
                yield None
                continue
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            yield item
            task = asyncio.ensure_future(anext(items))
    finally:
        task.cancel()
