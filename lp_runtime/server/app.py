"""The HTTP side of the server: OpenAI's routes over a scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from lp_runtime.engine.request import Request as DecodingRequest
from lp_runtime.engine.request_builder import RequestBuilder, RequestOptions
from lp_runtime.errors import LookaheadError, RequestError
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.errors import ApiError, Gate, invalid
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.protocol import Chat, Common, Completion
from lp_runtime.server.responses import LAST_EVENT, ChatForm, Choice, CompletionForm, Form, event
from lp_runtime.server.stop_trimmer import StopTrimmer

PAGE = Path(__file__).with_name("page.html")
POLL_SECONDS = 0.1  # between looks whether a client is still there


@dataclass(frozen=True)
class ServerSettings:
    """What the app must know beside its runtime.

    Attributes:
        name: of the model, as clients call it.
        api_key: that clients must send; None for none.
        max_body_bytes: of a request.
        max_new_tokens: of a request at most; None for what the model's context allows.
        queue_timeout: seconds that a request may wait; None for no limit.
    """

    name: str
    api_key: str | None = None
    max_body_bytes: int = 1 << 20
    max_new_tokens: int | None = None
    queue_timeout: float | None = None


class Server:
    """Turns HTTP requests into jobs and their pieces into answers.

    Args:
        runtime: for its model; only the scheduler uses its replicas.
        scheduler: decodes.
        settings: see there.
        tokenizer: of the server's own: tokenizers are not to be used by two threads.
    """

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler, settings: ServerSettings, tokenizer: Any):
        self._runtime, self._scheduler, self._settings = runtime, scheduler, settings
        self._tokenizer = tokenizer
        self._hidden = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._started = int(time.time())
        self.metrics = Metrics(runtime, scheduler)

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(title="lp_runtime", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.add_exception_handler(ApiError, lambda _, error: error.response())
        app.add_exception_handler(LookaheadError, lambda _, error: ApiError.of(error).response())
        app.add_exception_handler(RequestValidationError, invalid)
        app.add_exception_handler(HTTPException, lambda _, e: ApiError(e.status_code, str(e.detail)).response())
        app.add_middleware(Gate, api_key=self._settings.api_key, max_body_bytes=self._settings.max_body_bytes)
        app.get("/")(self.page)
        app.get("/health")(self.health)
        app.get("/metrics")(self.show_metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.chat)
        return app

    async def page(self) -> Response:
        return Response(PAGE.read_text(), media_type="text/html; charset=utf-8")

    async def health(self) -> JSONResponse:
        is_healthy = self._scheduler.is_healthy
        status = {"status": "ok" if is_healthy else "no replica is up", "replicas": self._runtime.num_ready}
        return JSONResponse(status, 200 if is_healthy else 503)

    async def show_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict:
        self._check_model(name)
        return self._model()

    def _model(self) -> dict:
        info = self._runtime.info
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._started,
            "owned_by": "lp_runtime",
            "max_model_len": info.context_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._settings.name):
            raise ApiError(404, f"model {name!r}: must be {self._settings.name}", code="model_not_found")

    async def complete(self, body: Completion, request: Request) -> Response:
        prompts = body.prompts()
        options = body.options(self._runtime.config.sampling)
        options["logprobs"] = body.logprobs is not None
        choices = self._submit(body, prompts, body.max_tokens, options)
        return await self._answer(body, request, choices, self._form(CompletionForm, body.logprobs is not None))

    async def chat(self, body: Chat, request: Request) -> Response:
        options = body.options(self._runtime.config.sampling)
        options["messages"] = [message.plain() for message in body.messages]
        options["logprobs"] = body.logprobs
        choices = self._submit(body, [None], body.length(), options)
        return await self._answer(body, request, choices, self._form(ChatForm, body.logprobs))

    def _form(self, kind: type[Form], with_logprobs: bool) -> Form:
        return kind(self._settings.name, lambda token: self._tokenizer.decode([token]), with_logprobs)

    def _submit(
        self, body: Common, prompts: Sequence[Any], max_new_tokens: int | None, options: RequestOptions
    ) -> list[Choice]:
        self._check_model(body.model)
        limit = self._settings.max_new_tokens
        if limit is not None and max_new_tokens is not None and max_new_tokens > limit:
            raise RequestError(f"max_tokens={max_new_tokens}: must be at most {limit}")
        num_texts, most = len(prompts) * body.n, self._scheduler.most_at_once
        if num_texts > most:
            asked = f"n={body.n}" if len(prompts) == 1 else f"{len(prompts)} prompts x n={body.n}"
            raise RequestError(f"{asked}: must be at most {most} with max_waiting={self._scheduler.max_waiting}")
        maker = RequestBuilder(self._runtime.config, self._runtime.info, lambda: self._tokenizer)
        requests: list[DecodingRequest] = []
        for prompt in prompts:
            first = maker.make(prompt, max_new_tokens, **options)
            if limit is not None and first.max_new_tokens > limit:
                first = maker.make(prompt, limit, **options)
            if body.n > 1 and first.sampling.seed is None:
                raise RequestError(f"n={body.n}: decoding is greedy; give temperature > 0")
            requests += [replace(first, sample=sample) for sample in range(body.n)]
        jobs = self._scheduler.submit_all(requests, self._settings.queue_timeout, body.gpus)
        return [Choice(index, job, StopTrimmer(job.request.stop, self._hidden)) for index, job in enumerate(jobs)]

    async def _answer(self, body: Common, request: Request, choices: list[Choice], form: Form) -> Response:
        arrived = time.perf_counter()
        events = self._events(choices, arrived)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(self._chunks(events, choices, form, with_usage), media_type="text/event-stream")

        async def collect() -> None:
            async for choice, text in events:
                choice.text += text

        task = asyncio.ensure_future(collect())
        try:
            while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
                if await request.is_disconnected():
                    raise ApiError(499, "the client has gone")
        finally:
            if not task.done():
                task.cancel()
            for choice in choices:
                choice.job.cancel()  # no matter if it has ended
        task.result()
        return JSONResponse(form.whole(choices))

    async def _events(self, choices: list[Choice], arrived: float) -> AsyncIterator[tuple[Choice, str]]:
        """(choice, text to be shown) of every piece, one choice after another; at the end of each its last text."""
        try:
            for choice in choices:
                async for piece in choice.job.pieces():
                    if not choice.tokens and choice.index == 0:
                        self.metrics.first_token.observe(time.perf_counter() - arrived)
                    yield choice, choice.add(piece)
                yield choice, choice.finish()
            self.metrics.whole.observe(time.perf_counter() - arrived)
        finally:
            for choice in choices:
                choice.job.cancel()

    async def _chunks(
        self, events: AsyncIterator[tuple[Choice, str]], choices: list[Choice], form: Form, with_usage: bool
    ) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            for chunk in form.opening(choices):
                yield event(chunk)
            shown = dict.fromkeys(range(len(choices)), 0)
            async for choice, text in events:
                new = slice(shown[choice.index], len(choice.tokens))
                shown[choice.index] = len(choice.tokens)
                is_told = form.with_logprobs or choice.job.request.trace
                if text or choice.reason or (is_told and new.start < new.stop):
                    yield event(form.chunk(choice, text, new))
            if with_usage:
                yield event(form.usage_chunk(choices))
        except LookaheadError as error:  # too late for a status
            yield event(ApiError.of(error).body)
        yield LAST_EVENT
