"""The HTTP routes of the server, in the form of the OpenAI API, over a scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from lp_runtime.engine.request import Request as DecodingRequest
from lp_runtime.engine.request_builder import RequestBuilder, RequestOptions
from lp_runtime.errors import LookaheadError, ReplicaError, RequestError
from lp_runtime.model.types import Tokenizer
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.errors import ApiError, invalid
from lp_runtime.server.gate import Gate, GateRules
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.protocol import Chat, Common, Completion
from lp_runtime.server.responses import LAST_EVENT, ChatForm, Choice, CompletionForm, Form, event
from lp_runtime.server.status import StatusRoutes
from lp_runtime.server.stop_trimmer import StopTrimmer

POLL_SECONDS = 0.1  # between checks whether a client is still connected


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP routes.

    Attributes:
        name: the model's name for clients.
        gate: who may ask, from where, how much and how slowly.
        max_new_tokens: tokens that a request may generate at most; None for what the model's context allows.
        queue_timeout: seconds that a request may wait in the queue; None for no limit.
        strict_fields: whether requests with unknown fields are refused.
    """

    name: str
    gate: GateRules = field(default_factory=GateRules)
    max_new_tokens: int | None = None
    queue_timeout: float | None = None
    strict_fields: bool = False


class Server:
    """Turns HTTP requests into jobs, and their deltas into answers.

    Args:
        runtime: describes the model; only the scheduler uses its replicas.
        scheduler: decodes the requests.
        settings: settings of the routes.
        tokenizer: the model's, for the server alone: two threads must not use one tokenizer.

    Attributes:
        metrics: what /metrics reports.
    """

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler, settings: ServerSettings, tokenizer: Tokenizer):
        self._runtime, self._scheduler, self._settings = runtime, scheduler, settings
        self._tokenizer = tokenizer
        self._special_tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.metrics = Metrics(runtime, scheduler)
        self._status = StatusRoutes(settings.name, runtime, scheduler, self.metrics)
        self._open: set[Job] = set()  # jobs whose answers have not ended

    def app(self) -> FastAPI:
        """Return the application: routes, error handlers, and the gate before them."""
        app = FastAPI(title="lp_runtime", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.add_exception_handler(ApiError, lambda _, error: error.response())
        app.add_exception_handler(LookaheadError, lambda _, error: ApiError.of(error).response())
        app.add_exception_handler(RequestValidationError, invalid)
        app.add_exception_handler(HTTPException, _of_http)
        gate = self._settings.gate
        app.add_middleware(Gate, rules=gate)
        if gate.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=gate.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
                expose_headers=("X-Request-Id",),
            )
        self._status.add_to(app)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.chat)
        return app

    def drain(self) -> None:
        """Take no new request from now on."""
        self._status.is_draining = True

    def abort(self, error: LookaheadError) -> None:
        """End every answer at once: clients read what there is and the error."""
        for job in list(self._open):
            job.abort(error)

    async def complete(self, body: Completion, request: Request) -> Response:
        """Answer POST /v1/completions."""
        prompts = body.prompts()
        options = body.options(self._runtime.config.sampling)
        options["logprobs"] = body.logprobs is not None
        choices = self._submit(body, prompts, body.max_tokens, options)
        return await self._answer(body, request, choices, self._form(CompletionForm, body.logprobs is not None))

    async def chat(self, body: Chat, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        options = body.options(self._runtime.config.sampling)
        options["messages"] = [message.plain() for message in body.messages]
        options["logprobs"] = body.logprobs
        choices = self._submit(body, [None], body.length(), options)
        return await self._answer(body, request, choices, self._form(ChatForm, body.logprobs))

    def _form(self, kind: type[Form], with_logprobs: bool) -> Form:
        return kind(self._settings.name, self._token_text, with_logprobs)

    def _token_text(self, token: int) -> str:
        return cast(str, self._tokenizer.decode([token]))  # a list of texts is for a list of sequences alone

    def _submit(
        self,
        body: Common,
        prompts: Sequence[str | list[int] | None],
        max_new_tokens: int | None,
        options: RequestOptions,
    ) -> list[Choice]:
        """Submit `body.n` samples of each prompt.

        Args:
            body: what the client sent.
            prompts: texts or token ids; None where `options` has messages.
            max_new_tokens: tokens that the client asks for at most; None for the default.
            options: options of every request.

        Raises:
            ApiError: the client names another model.
            LookaheadError: a request is refused, or there is no place for all of them.
        """
        self._status.check_model(body.model)
        if self._status.is_draining:
            raise ReplicaError("the server is shutting down")
        limit = self._settings.max_new_tokens
        if limit is not None and max_new_tokens is not None and max_new_tokens > limit:
            raise RequestError(f"max_tokens={max_new_tokens}: must be at most {limit}")
        num_choices, max_jobs = len(prompts) * body.n, self._scheduler.max_jobs
        if num_choices > max_jobs:
            asked = f"n={body.n}" if len(prompts) == 1 else f"{len(prompts)} prompts x n={body.n}"
            raise RequestError(f"{asked}: must be at most {max_jobs} with max_waiting={self._scheduler.max_waiting}")
        builder = RequestBuilder(self._runtime.config, self._runtime.info, lambda: self._tokenizer)
        requests: list[DecodingRequest] = []
        for prompt in prompts:
            first = self._request(builder, prompt, max_new_tokens, options)
            if body.n > 1 and first.sampling.seed is None:
                raise RequestError(f"n={body.n}: decoding is greedy; give temperature > 0")
            requests += [replace(first, sample=sample) for sample in range(body.n)]
        jobs = self._scheduler.submit_all(requests, self._settings.queue_timeout, body.gpus)
        self._open.update(jobs)
        return [
            Choice(index, job, StopTrimmer(job.request.stop, self._special_tokens)) for index, job in enumerate(jobs)
        ]

    def _request(
        self,
        builder: RequestBuilder,
        prompt: str | list[int] | None,
        max_new_tokens: int | None,
        options: RequestOptions,
    ) -> DecodingRequest:
        """Return a checked request; the model's own default of max_new_tokens is capped by the server's limit."""
        request = builder.build(prompt, max_new_tokens, **options)
        limit = self._settings.max_new_tokens
        return request if limit is None or request.max_new_tokens <= limit else builder.build(prompt, limit, **options)

    async def _answer(self, body: Common, request: Request, choices: list[Choice], form: Form) -> Response:
        """Answer with the choices, streamed or whole.

        Raises:
            ApiError: the client has disconnected.
            LookaheadError: a job has failed.
        """
        arrived = time.perf_counter()
        texts = self._texts(choices, arrived)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(self._chunks(texts, choices, form, with_usage), media_type="text/event-stream")

        async def collect() -> None:
            async for choice, text in texts:
                choice.text += text

        task = asyncio.ensure_future(collect())
        try:
            while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
                if await request.is_disconnected():
                    raise ApiError(499, "the client has gone")
        finally:
            if not task.done():
                task.cancel()
            self._close(choices)
        task.result()
        return JSONResponse(form.whole(choices))

    async def _texts(self, choices: list[Choice], arrived: float) -> AsyncIterator[tuple[Choice, str]]:
        """Yield (choice, text to show) for every delta, one choice after another, and for each choice's end.

        Args:
            choices: the choices; each grows by its deltas. All jobs are cancelled if the iteration ends early.
            arrived: when the HTTP request arrived, on time.perf_counter's clock.
        """
        try:
            for choice in choices:
                async for delta in choice.job.deltas():
                    if not choice.tokens and choice.index == 0:
                        self.metrics.first_token.observe(time.perf_counter() - arrived)
                    yield choice, choice.add(delta)
                yield choice, choice.finish()
            self.metrics.whole.observe(time.perf_counter() - arrived)
        finally:
            self._close(choices)

    def _close(self, choices: list[Choice]) -> None:
        """Cancel the jobs of an answer that has ended, without effect on those that have ended themselves."""
        for choice in choices:
            choice.job.cancel()
            self._open.discard(choice.job)

    async def _chunks(
        self, texts: AsyncIterator[tuple[Choice, str]], choices: list[Choice], form: Form, with_usage: bool
    ) -> AsyncIterator[str]:
        """Yield the answer as server-sent events; an error of a job becomes one, too."""
        try:
            for chunk in form.opening(choices):
                yield event(chunk)
            num_sent = dict.fromkeys(range(len(choices)), 0)
            async for choice, text in texts:
                new = slice(num_sent[choice.index], len(choice.tokens))
                num_sent[choice.index] = len(choice.tokens)
                shows_tokens = form.with_logprobs or choice.job.request.trace
                if text or choice.reason or (shows_tokens and new.start < new.stop):
                    yield event(form.chunk(choice, text, new))
            if with_usage:
                yield event(form.usage_chunk(choices))
        except LookaheadError as error:  # too late for a status
            yield event(ApiError.of(error).body)
        yield LAST_EVENT


def _of_http(_: Request, error: Exception) -> Response:
    """Answer an HTTPException of the framework's in the form of the OpenAI API."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer.response()
