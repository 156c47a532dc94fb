"""The HTTP side of the server: OpenAI's routes over a scheduler."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from lp_runtime.api import LookaheadRuntime
from lp_runtime.decoding import Request as DecodingRequest
from lp_runtime.errors import BusyError, ConfigError, DeadlineError, LookaheadError, RequestError
from lp_runtime.generation import Piece
from lp_runtime.request import RequestMaker, RequestOptions
from lp_runtime.scheduler import Job, Scheduler
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.protocol import Chat, Common, Completion
from lp_runtime.server.trimming import StopTrimmer

PAGE = Path(__file__).with_name("page.html")
POLL_SECONDS = 0.1  # between looks whether a client is still there
REASONS = {"eos": "stop", "stop": "stop"}  # of ours, in OpenAI's terms; all others are "length"
STATUS = {RequestError: 400, ConfigError: 400, BusyError: 429, DeadlineError: 503}  # of ours; all others are 503


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


class ApiError(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}

    @classmethod
    def of(cls, error: LookaheadError) -> ApiError:
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
        kind = "invalid_request_error" if status == 400 else "server_error"
        return cls(status, str(error), kind, type(error).__name__)

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


@dataclass
class Choice:
    """One of the texts of an answer, as it grows."""

    index: int
    job: Job
    trimmer: StopTrimmer
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    found_by: list[int] = field(default_factory=list)
    reason: str | None = None

    def add(self, piece: Piece) -> str:
        """Take a piece; returns what of its text may be shown."""
        self.tokens += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.found_by += piece.found_by or ()
        return self.trimmer.add(piece.text)

    def finish(self) -> str:
        """The job has ended; returns what of the text may still be shown."""
        finish_reason = self.job.generation.finish_reason
        self.reason = REASONS.get(finish_reason, "length")
        return self.trimmer.finish(finish_reason == "stop")


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
        self._started = int(time.time())
        self.metrics = Metrics(runtime, scheduler)

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(title="lp_runtime", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(ApiError, lambda _, error: error.response())
        app.add_exception_handler(LookaheadError, lambda _, error: ApiError.of(error).response())
        app.add_exception_handler(RequestValidationError, _invalid)
        app.add_exception_handler(HTTPException, lambda _, e: ApiError(e.status_code, str(e.detail)).response())
        app.add_middleware(_Gate, settings=self._settings)
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
        return await self._answer(body, request, choices, CompletionForm(self, bool(options["logprobs"])))

    async def chat(self, body: Chat, request: Request) -> Response:
        options = body.options(self._runtime.config.sampling)
        options["messages"] = [message.plain() for message in body.messages]
        options["logprobs"] = body.logprobs
        choices = self._submit(body, [None], body.length(), options)
        return await self._answer(body, request, choices, ChatForm(self, body.logprobs))

    def _submit(
        self, body: Common, prompts: Sequence[Any], max_new_tokens: int | None, options: RequestOptions
    ) -> list[Choice]:
        self._check_model(body.model)
        limit = self._settings.max_new_tokens
        if limit is not None and max_new_tokens is not None and max_new_tokens > limit:
            raise RequestError(f"max_tokens={max_new_tokens}: must be at most {limit}")
        maker = RequestMaker(self._runtime.config, self._runtime.info, lambda: self._tokenizer)
        requests: list[DecodingRequest] = []
        for prompt in prompts:
            first = maker.make(prompt, max_new_tokens, **options)
            if limit is not None and first.max_new_tokens > limit:
                first = maker.make(prompt, limit, **options)
            if body.n > 1 and first.sampling.seed is None:
                raise RequestError(f"n={body.n}: decoding is greedy; give temperature > 0")
            requests += [replace(first, sample=sample) for sample in range(body.n)]
        jobs = self._scheduler.submit_all(requests, self._settings.queue_timeout)
        return [Choice(index, job, StopTrimmer(job.request.stop)) for index, job in enumerate(jobs)]

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
                yield _event(chunk)
            shown = dict.fromkeys(range(len(choices)), 0)
            async for choice, text in events:
                new = slice(shown[choice.index], len(choice.tokens))
                shown[choice.index] = len(choice.tokens)
                is_told = form.with_logprobs or choice.job.request.trace
                if text or choice.reason or (is_told and new.start < new.stop):
                    yield _event(form.chunk(choice, text, new))
            if with_usage:
                yield _event(form.usage_chunk(choices))
        except LookaheadError as error:  # too late for a status
            yield _event(ApiError.of(error).body)
        yield "data: [DONE]\n\n"

    def token_text(self, token: int) -> str:
        """A token as text, for log-probabilities."""
        return self._tokenizer.decode([token])

    @property
    def name(self) -> str:
        return self._settings.name


def _event(body: dict) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Form(ABC):
    """The shape of an answer: a completion's or a chat's."""

    prefix: str
    kind: str

    def __init__(self, server: Server, with_logprobs: bool):
        self._server = server
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.name}
        self.with_logprobs = with_logprobs

    def usage(self, choices: list[Choice]) -> dict[str, int]:
        prompts = {id(choice.job.request.prompt_ids): len(choice.job.request.prompt_ids) for choice in choices}
        num_new = sum(len(choice.tokens) for choice in choices)
        num_prompt = sum(prompts.values())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def opening(self, choices: list[Choice]) -> list[dict]:
        """Chunks before any text."""
        return []

    def chunk_kind(self) -> str:
        return self.kind

    def usage_chunk(self, choices: list[Choice]) -> dict:
        return {**self._head, "object": self.chunk_kind(), "choices": [], "usage": self.usage(choices)}

    def whole(self, choices: list[Choice]) -> dict:
        """The answer in one piece."""
        bodies = [self.choice(choice) for choice in choices]
        return {**self._head, "object": self.kind, "choices": bodies, "usage": self.usage(choices)}

    def chunk(self, choice: Choice, text: str, new: slice) -> dict:
        """A piece of a streamed answer; `new` are the tokens that it brings."""
        delta = self.delta(choice, text, new)
        if choice.job.request.trace:  # beyond OpenAI's: what this step has brought
            delta["lookahead"] = {"tokens": len(choice.tokens[new]), "found_by": choice.found_by[new]}
        return {**self._head, "object": self.chunk_kind(), "choices": [delta]}

    @abstractmethod
    def choice(self, choice: Choice) -> dict:
        """One of the texts of a whole answer."""

    @abstractmethod
    def delta(self, choice: Choice, text: str, new: slice) -> dict:
        """The same of a piece."""


class CompletionForm(Form):
    """Of /v1/completions."""

    prefix, kind = "cmpl", "text_completion"

    def choice(self, choice: Choice) -> dict:
        return self.delta(choice, choice.text, slice(None))

    def delta(self, choice: Choice, text: str, new: slice) -> dict:
        logprobs = None
        if self.with_logprobs:
            texts = [self._server.token_text(token) for token in choice.tokens[new]]
            logprobs = {
                "tokens": texts,
                "token_logprobs": choice.logprobs[new],
                "top_logprobs": None,
                "text_offset": None,
            }
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason}


class ChatForm(Form):
    """Of /v1/chat/completions."""

    prefix, kind = "chatcmpl", "chat.completion"

    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def opening(self, choices: list[Choice]) -> list[dict]:
        deltas = [
            {"index": c.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None} for c in choices
        ]
        return [{**self._head, "object": self.chunk_kind(), "choices": [delta]} for delta in deltas]

    def choice(self, choice: Choice) -> dict:
        message = {"role": "assistant", "content": choice.text}
        logprobs = self._logprobs(choice, slice(None))
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def delta(self, choice: Choice, text: str, new: slice) -> dict:
        delta = {"content": text} if text else {}
        logprobs = self._logprobs(choice, new)
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.reason}

    def _logprobs(self, choice: Choice, new: slice) -> dict | None:
        if not self.with_logprobs:
            return None
        pairs = zip(choice.tokens[new], choice.logprobs[new], strict=True)
        texts = [(self._server.token_text(token), value) for token, value in pairs]
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in texts
        ]
        return {"content": content}


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    """What pydantic has found, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return ApiError(400, f"{where}: {first['msg']}").response()


class _Gate:
    """Before anything is read: the key, and the size of the body."""

    def __init__(self, app: Callable, settings: ServerSettings):
        self._app, self._settings = app, settings

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key = self._settings.api_key
        if key is not None and scope["path"].startswith("/v1/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + key.encode()):
                error = ApiError(401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")
                await error.response()(scope, receive, send)
                return
        limit, size = self._settings.max_body_bytes, 0
        too_large = ApiError(413, f"the request is too large: must be at most {limit} bytes")
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > limit:
            await too_large.response()(scope, receive, send)
            return

        async def counted() -> dict:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, f"the request is too large: must be at most {limit} bytes")
            return message

        await self._app(scope, counted, send)
