"""The OpenAI-compatible HTTP routes of the server, on top of a scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from lp_runtime.chat.answer import end_of
from lp_runtime.chat.tool_use import ToolUse
from lp_runtime.errors import LookaheadError, ReplicaError, RequestError
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.replica.request_builder import RequestOptions
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.anthropic.messages_api import Messages
from lp_runtime.server.anthropic.messages_form import MessagesForm
from lp_runtime.server.errors import ApiError, invalid
from lp_runtime.server.gate import Gate
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.openai.chat_form import ChatForm
from lp_runtime.server.openai.protocol import Chat, Common, Completion, StreamOptions
from lp_runtime.server.openai.responses import Choice, CompletionForm, Form
from lp_runtime.server.openai.responses_api import Responses
from lp_runtime.server.openai.responses_form import ResponsesForm
from lp_runtime.server.status import StatusRoutes
from lp_runtime.server.submission import ServerSettings, Submitter
from lp_runtime.server.token_routes import TokenRoutes
from lp_runtime.text.token_text import TokenTexts, prompt_texts
from lp_runtime.utils.json_line import to_json

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.1  # between checks whether a client is still connected


class Server:
    """The routes: turns HTTP requests into scheduler jobs, and their deltas into answers.

    Args:
        runtime: describes the model; only the scheduler uses its replicas.
        tokenizer: used by the server only, because two threads must not share a tokenizer.
    """

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler, settings: ServerSettings, tokenizer: Tokenizer):
        self._settings, self._tokenizer = settings, tokenizer
        self._sampling, self._defaults = runtime.config.sampling, runtime.info.defaults
        self._context_length = runtime.info.context_length
        self._open: set[Job] = set()  # jobs of unfinished answers
        self.metrics = Metrics(settings.name, runtime, scheduler, self._open)
        self._status = StatusRoutes(settings.name, runtime, scheduler, self.metrics)
        self._submitter = Submitter(runtime, scheduler, settings, tokenizer)
        self._token_texts = TokenTexts(tokenizer)
        self._token_routes = TokenRoutes(runtime, self._status, self._submitter, tokenizer)

    def app(self) -> FastAPI:
        """Build the FastAPI application: routes, error handlers, and the gate in front of them."""
        app = FastAPI(title="lp_runtime", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.add_exception_handler(ApiError, lambda request, error: error.response(request.url.path))
        app.add_exception_handler(LookaheadError, lambda request, error: ApiError.of(error).response(request.url.path))
        app.add_exception_handler(RequestValidationError, invalid)
        app.add_exception_handler(HTTPException, _of_http)
        app.add_exception_handler(
            Exception, lambda request, error: ApiError.unforeseen(error).response(request.url.path)
        )
        gate = self._settings.gate
        app.add_middleware(Gate, rules=gate)
        if gate.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=gate.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # client libraries send custom headers, such as X-Stainless-Lang
                expose_headers=("X-Request-Id",),
            )
        self._status.add_to(app)
        self._token_routes.add_to(app)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/responses")(self.respond)
        app.post("/v1/messages")(self.message)
        return app

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._status.is_draining = True

    def close(self) -> None:
        """Export the remaining trace spans."""
        if self._settings.tracing is not None:
            self._settings.tracing.close()

    def abort(self, error: LookaheadError) -> None:
        """End every running answer now: clients receive the text so far and the error."""
        for job in list(self._open):
            job.abort(error)

    async def complete(self, body: Completion, request: Request) -> Response:
        """Answer POST /v1/completions."""
        options = self._options(body, request, body.logprobs)
        options["prompt_logprobs"] = body.echo and body.logprobs is not None
        prompts = body.prompts()
        split = body.split_special_tokens
        ids = [
            await self._submitter.encode(each, split, body.suffix) if isinstance(each, str) else each
            for each in prompts
        ]
        ids = [body.truncated(each, self._context_length) for each in ids]
        choices = await self._submit(body, ids, body.length(), options)
        if body.echo:
            self._echo(choices, [prompt for prompt in prompts for _ in range(body.n)], body.logprobs is not None)
        form = CompletionForm(self._settings.name, self._token_texts, body.logprobs, body.shows_new)
        return await self._answer(body, request, choices, form)

    async def chat(self, body: Chat, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        num_top, use = body.num_top_logprobs(), body.tool_use()
        choices = await self._converse(body, request, use, num_top)
        return await self._answer(
            body,
            request,
            choices,
            ChatForm(self._settings.name, self._token_texts, num_top, use.max_calls),
        )

    async def respond(self, body: Responses, request: Request) -> Response:
        """Answer POST /v1/responses."""
        use = body.tool_use()
        choices = await self._converse(body, request, use, None)
        return await self._answer(
            body, request, choices, ResponsesForm(self._settings.name, self._token_texts, body, use.max_calls)
        )

    async def message(self, body: Messages, request: Request) -> Response:
        """Answer POST /v1/messages."""
        use = body.tool_use()
        choices = await self._converse(body, request, use, None)
        lengths = [length for length in (body.length(), self._settings.max_new_tokens) if length is not None]
        form = MessagesForm(self._settings.name, self._token_texts, min(lengths, default=None), use.max_calls)
        return await self._answer(body, request, choices, form)

    async def _converse(
        self, body: Chat | Messages | Responses, request: Request, use: ToolUse, num_top: int | None
    ) -> list[Choice]:
        """Submit a conversation, with parsers that split its answers into reasoning, text and tool calls."""
        options = self._options(body, request, num_top)
        chat_format, has_tools = self._submitter.chat_format, bool(use.tools)
        if has_tools and not chat_format.takes_tools:
            raise RequestError("tools: the model's chat template takes none")
        kwargs = {**body.template_kwargs(), **body.rendering()}
        ids = await self._submitter.encode_chat(body.conversation(), body.split_special_tokens, use.tools, kwargs)
        ids = body.truncated(ids, self._context_length)
        prompt_end = end_of(ids, self._tokenizer)
        text_constraint = options.get("constraint")
        options["constraint"] = chat_format.constraint(use, text_constraint, prompt_end)
        options["is_answer"] = not body.continues_message
        options["skip_special_tokens"] &= not chat_format.shows_special_tokens(has_tools)
        options["reasoning"] = marks = chat_format.reasoning_marks(prompt_end)
        if (num_tokens := body.reasoning_budget()) is not None and marks is not None:
            budget = self._submitter.reasoning_budget(marks, len(ids), num_tokens)
            options["processors"] = [*options.get("processors", ()), budget]
        choices = await self._submit(body, [ids], body.length(), options)
        for choice in choices:
            choice.parser = chat_format.parser(use.tools, prompt_end, text_constraint is not None)
        return choices

    def _options(self, body: Common, request: Request, num_top: int | None) -> RequestOptions:
        """Check a body and return the options of its decoding requests.

        `num_top` is the number of likeliest tokens per log-probability; None for no log-probabilities.
        """
        self._status.check_model(body.model)
        self._submitter.check_fields(body, request.state.request_id)
        options = body.options(self._submitter.with_bad_words(self._sampling, body.bad_words), self._defaults)
        options["request_id"] = request.state.request_id
        # The space separates unambiguously: client names contain none (read_api_keys).
        options["cache_salt"] = f"{request.state.client} {body.cache_salt}"
        options["logprobs"], options["top_logprobs"] = num_top is not None, num_top or 0
        return options

    async def _submit(
        self, body: Common, prompts: list[list[int]], max_new_tokens: int | None, options: RequestOptions
    ) -> list[Choice]:
        """Submit a body's requests, unless the server is draining; see Submitter.submit."""
        if self._status.is_draining:
            raise ReplicaError("the server is shutting down")
        await self._submitter.compile(options)
        choices = self._submitter.submit(body, prompts, max_new_tokens, options)
        self._open.update(choice.job for choice in choices)
        return choices

    def _echo(self, choices: list[Choice], prompts: Sequence[str | list[int]], with_texts: bool) -> None:
        """Show each choice's prompt before its text; `with_texts`: also the texts of its tokens."""
        for choice, prompt in zip(choices, prompts, strict=True):
            if isinstance(prompt, str) and not with_texts:
                choice.prefix = prompt
                continue
            ids = choice.job.request.prompt_ids
            choice.prefix_texts = prompt_texts(self._tokenizer, ids, prompt if isinstance(prompt, str) else None)
            choice.prefix = "".join(choice.prefix_texts)

    async def _answer(self, body: Common, request: Request, choices: list[Choice], form: Form) -> Response:
        """Build the HTTP response: a stream of events, or one JSON body once all choices have ended."""
        texts = self._texts(choices, time.perf_counter())
        if (tracing := self._settings.tracing) is not None:
            request_id = request.state.request_id
            texts = tracing.traced(texts, request.headers, request.url.path, request_id, body, choices)
        if body.stream:
            stream_options = body.stream_options or StreamOptions()
            with_usage = stream_options.include_usage
            form.counts_each = with_usage and stream_options.continuous_usage_stats
            return StreamingResponse(self._events(texts, choices, form, with_usage), media_type="text/event-stream")

        async def collect() -> None:
            async for choice, text in texts:
                choice.text += text

        task = asyncio.ensure_future(collect())
        try:
            while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
                if await request.is_disconnected():
                    raise ApiError(499, "the client has disconnected")
        finally:
            if not task.done():
                task.cancel()
            self._close(choices)
        task.result()
        return Response(to_json(form.whole(choices)), media_type="application/json")

    async def _texts(self, choices: list[Choice], arrived: float) -> AsyncGenerator[tuple[Choice, str], None]:
        """Yield (choice, text to show) for every delta and for each choice's end, one choice after another.

        If the iteration ends early, all jobs are cancelled. `arrived` is the request's arrival by time.perf_counter().
        """
        latest = 0.0
        try:
            for choice in choices:
                async for delta in choice.job.deltas():
                    now = time.perf_counter()
                    if not choice.tokens and choice.index == 0:
                        self.metrics.first_token.observe(now - arrived)
                    elif choice.tokens and delta.token_ids:
                        self.metrics.inter_token.observe((now - latest) / len(delta.token_ids))
                    latest = now
                    yield choice, choice.add(delta)
                if choice.job.queue_seconds is not None:
                    self.metrics.queue.observe(choice.job.queue_seconds)
                yield choice, choice.finish()
            self.metrics.whole.observe(time.perf_counter() - arrived)
        finally:
            self._close(choices)

    def _close(self, choices: list[Choice]) -> None:
        """Cancel the jobs of an answer; no effect on jobs that have already ended."""
        for choice in choices:
            choice.job.cancel()
            self._open.discard(choice.job)

    async def _events(
        self, texts: AsyncIterator[tuple[Choice, str]], choices: list[Choice], form: Form, with_usage: bool
    ) -> AsyncIterator[str]:
        """Yield the answer as server-sent events; an error becomes an event too."""
        try:
            for each in form.opening(choices):
                yield each
            num_sent = dict.fromkeys(range(len(choices)), 0)
            waited = _with_waits(texts, self._settings.ping_seconds) if form.waiting() else texts
            async for found in waited:
                for each in [form.waiting()] if found is None else _grown(form, *found, num_sent):
                    yield each
            for each in form.closing(choices, with_usage):
                yield each
        except Exception as error:  # the HTTP status has already been sent
            for each in form.failure(_api_error(error).body):
                yield each


async def _with_waits(items: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """Yield the items, and None whenever none has come for some seconds."""
    task = asyncio.ensure_future(anext(items))
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


def _grown(form: Form, choice: Choice, text: str, num_sent: dict[int, int]) -> Iterator[str]:
    """Yield the events for new text of a choice; `num_sent` counts the tokens of each that have been in events."""
    new = slice(num_sent[choice.index], choice.num_final)
    num_sent[choice.index] = choice.num_final
    shows_tokens = form.shows_tokens or choice.job.request.trace
    if text or choice.reason or (shows_tokens and new.start < new.stop):
        yield from form.grown(choice, text, new)


def _api_error(error: Exception) -> ApiError:
    """Convert any exception to an ApiError; log the traceback if it is not one of this package's errors."""
    if isinstance(error, LookaheadError):
        return ApiError.of(error)
    log.error("an answer has failed", exc_info=error)
    return ApiError.unforeseen(error)


def _of_http(request: Request, error: Exception) -> Response:
    """Answer an HTTPException raised by FastAPI or the gate in the error format of the path's API."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer.response(request.url.path)
