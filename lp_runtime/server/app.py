"""The OpenAI-compatible HTTP routes of the server, on top of a scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from lp_runtime.chat.answer import end_of
from lp_runtime.chat.chat_format import Tool
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import LookaheadError, ReplicaError, RequestError
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.job import Job
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.answers import PING_SECONDS, Answers
from lp_runtime.server.anthropic.messages_api import Messages
from lp_runtime.server.anthropic.messages_form import MessagesForm
from lp_runtime.server.http.errors import ApiError, handle, in_client_words
from lp_runtime.server.http.gate import Gate
from lp_runtime.server.http.settings import read_api_keys, served_name
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.openai.choice import Choice
from lp_runtime.server.openai.common import Common
from lp_runtime.server.openai.forms import ChatForm, CompletionForm
from lp_runtime.server.openai.protocol import Chat, Completion, Detokenize, Tokenize
from lp_runtime.server.openai.responses_api import Responses
from lp_runtime.server.openai.responses_form import ResponsesForm
from lp_runtime.server.status import StatusRoutes
from lp_runtime.server.submission import Submitter
from lp_runtime.server.tracing import Tracing
from lp_runtime.text.token_text import TokenTexts


class Server:
    """The routes: turns HTTP requests into scheduler jobs, and their deltas into answers.

    Args:
        runtime: describes the model; only the scheduler uses its replicas.
        tracing: creates spans instead of those that `config.otlp_endpoint` asks for.
        ping_seconds: time between events that keep a stream open while there is no text.
    """

    def __init__(
        self,
        runtime: LookaheadRuntime,
        scheduler: Scheduler,
        config: ServeConfig,
        tracing: Tracing | None = None,
        ping_seconds: float = PING_SECONDS,
    ):
        self._config, self._name = config, served_name(config)
        self._api_keys = read_api_keys(config)
        self._tokenizer = load_tokenizer(config.model)  # two threads must not share a tokenizer
        self._sampling, self._info = runtime.config.sampling, runtime.info
        if tracing is None and config.otlp_endpoint is not None:
            tracing = Tracing.to(config.otlp_endpoint, self._name)
        self._tracing = tracing
        running: set[Job] = set()  # of unfinished answers
        self._responses: Counter[int] = Counter()  # by HTTP status
        metrics = Metrics(self._name, runtime, scheduler, running, self._responses)
        self._answers = Answers(metrics, running, tracing, ping_seconds)
        self._status = StatusRoutes(config, runtime, scheduler, metrics)
        self._submitter = Submitter(runtime, scheduler, config, self._tokenizer)
        self._token_texts = TokenTexts(self._tokenizer)

    def app(self) -> FastAPI:
        """Build the FastAPI application: routes, error handlers, and the gate in front of them."""
        app = FastAPI(title="lp_runtime", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        for error in (ApiError, LookaheadError, RequestValidationError, HTTPException, Exception):
            app.add_exception_handler(error, handle)
        app.add_middleware(Gate, config=self._config, api_keys=self._api_keys, responses=self._responses)
        if self._config.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._config.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # client libraries send custom headers, such as X-Stainless-Lang
                expose_headers=("X-Request-Id",),
            )
        self._status.add_to(app)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/responses")(self.respond)
        app.post("/v1/messages")(self.message)
        app.post("/v1/messages/count_tokens")(self.count_tokens)
        app.post("/v1/responses/input_tokens")(self.count_input_tokens)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        return app

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._status.is_draining = True

    def close(self) -> None:
        """Export the remaining trace spans."""
        if self._tracing is not None:
            self._tracing.close()

    def abort(self, error: LookaheadError) -> None:
        """End every running answer now: clients receive the text so far and the error."""
        self._answers.abort(error)

    async def complete(self, body: Completion, request: Request) -> Response:
        options = await self._options(body, request, body.logprobs)
        options["prompt_logprobs"] = body.echo and body.logprobs is not None
        prompts, ids = body.prompts(), []
        for prompt in prompts:
            if isinstance(prompt, str):
                split, adds_special = body.split_special_tokens, body.add_special_tokens
                prompt = await self._submitter.encode(prompt, split, body.suffix, adds_special)
            ids.append(body.truncated(prompt, self._info.context_length))
        echoes = await self._echoes(prompts, ids, body.logprobs is not None) if body.echo else []
        choices = await self._submit(body, ids, options)
        for number, (text, texts) in enumerate(echoes):
            for choice in choices[number * body.n :][: body.n]:
                choice.prefix, choice.prefix_texts = text, texts
        for choice in choices:
            choice.shows_new = body.shows_new
        form = CompletionForm(self._name, self._token_texts, body.logprobs, body.stream_options)
        return await self._answers.respond(body, request, choices, form)

    async def chat(self, body: Chat, request: Request) -> Response:
        num_top = body.num_top_logprobs()
        choices = await self._converse(body, request, num_top)
        form = ChatForm(self._name, self._token_texts, num_top, body.stream_options)
        return await self._answers.respond(body, request, choices, form)

    async def respond(self, body: Responses, request: Request) -> Response:
        choices = await self._converse(body, request)
        form = ResponsesForm(self._name, self._token_texts, body)
        return await self._answers.respond(body, request, choices, form)

    async def message(self, body: Messages, request: Request) -> Response:
        choices = await self._converse(body, request)
        lengths = [length for length in (body.length(), self._config.max_new_tokens) if length is not None]
        form = MessagesForm(self._name, self._token_texts, min(lengths, default=None))
        return await self._answers.respond(body, request, choices, form)

    async def count_tokens(self, body: Messages, request: Request) -> dict[str, int]:
        return {"input_tokens": await self._count(body, request)}

    async def count_input_tokens(self, body: Responses, request: Request) -> dict[str, object]:
        return {"object": "response.input_tokens", "input_tokens": await self._count(body, request)}

    async def _count(self, body: Messages | Responses, request: Request) -> int:
        self._status.check_model(body.model)
        self._submitter.check_fields(body, request.state.request_id)
        return len(await self._encode(body, body.tool_use().tools))

    async def tokenize(self, body: Tokenize) -> dict[str, object]:
        self._status.check_model(body.model)
        split = body.split_special_tokens
        if body.prompt is not None and body.messages is None:
            ids = await self._submitter.encode(body.prompt, split, add_special_tokens=body.add_special_tokens)
        elif body.messages is not None and body.prompt is None:
            messages, tools = [each.plain() for each in body.messages], [tool.plain() for tool in body.tools]
            ids = await self._submitter.encode_chat(messages, split, tools, body.template_kwargs(), body.rendering())
        else:
            raise RequestError("prompt and messages: give one of them")
        strings = await self._submitter.spellings(ids) if body.return_token_strs else None
        length = self._info.context_length
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    async def detokenize(self, body: Detokenize) -> dict[str, object]:
        self._status.check_model(body.model)
        return {"prompt": await self._submitter.decode(body.tokens)}

    async def _encode(self, body: Chat | Messages | Responses, tools: Sequence[Tool]) -> list[int]:
        return await self._submitter.encode_chat(
            body.conversation(), body.split_special_tokens, tools, body.template_kwargs(), body.rendering()
        )

    async def _converse(
        self, body: Chat | Messages | Responses, request: Request, num_top: int | None = None
    ) -> list[Choice]:
        """Submit a conversation, with parsers that split its answers into reasoning, text and tool calls."""
        use = body.tool_use()
        options = await self._options(body, request, num_top)
        chat_format, has_tools = self._submitter.chat_format, bool(use.tools)
        if has_tools and not chat_format.takes_tools:
            raise RequestError("tools: the model's chat template takes none")
        ids = body.truncated(await self._encode(body, use.tools), self._info.context_length)
        prompt_end = end_of(ids, self._tokenizer)
        text_constraint = options.get("constraint")
        options["constraint"] = chat_format.constraint(use, text_constraint, prompt_end)
        options["is_answer"] = not body.continues_message
        options["skip_special_tokens"] &= not chat_format.shows_special_tokens(has_tools)
        options["reasoning"] = marks = chat_format.reasoning_marks(prompt_end, text_constraint)
        if (num_tokens := body.reasoning_budget()) is not None and marks is not None:
            budget = await self._submitter.reasoning_budget(marks, len(ids), num_tokens)
            options["processors"] = [*options.get("processors", ()), budget]
        choices = await self._submit(body, [ids], options)
        for choice in choices:
            choice.parser = chat_format.parser(use.tools, prompt_end, text_constraint)
            choice.max_calls = use.max_calls
        return choices

    async def _options(self, body: Common, request: Request, num_top: int | None) -> RequestOptions:
        """Check a body and return the options of its decoding requests.

        `num_top` is the number of likeliest tokens per log-probability; None for no log-probabilities.
        """
        self._status.check_model(body.model)
        self._submitter.check_fields(body, request.state.request_id)
        sampling = await self._submitter.with_bad_words(self._sampling, body.bad_words)
        with in_client_words(body.length_field):
            options = body.options(sampling, self._info.defaults)
        options["request_id"] = request.state.request_id
        # The space separates unambiguously: client names contain none (read_api_keys).
        client = request.state.client
        options["cache_salt"] = f"{client} {body.cache_salt}" if client else body.cache_salt
        options["logprobs"], options["top_logprobs"] = num_top is not None, num_top or 0
        return options

    async def _submit(self, body: Common, prompts: list[list[int]], options: RequestOptions) -> list[Choice]:
        """Submit a body's requests, unless the server is draining; see Submitter.submit."""
        if self._status.is_draining:
            raise ReplicaError("the server is shutting down")
        await self._submitter.prepare(options)
        with in_client_words(body.length_field):
            choices = self._submitter.submit(body, prompts, options)
        self._answers.add(choices)
        return choices

    async def _echoes(
        self, prompts: Sequence[str | list[int]], ids: Sequence[list[int]], with_texts: bool
    ) -> list[tuple[str, list[str]]]:
        """Return the text of each prompt; `with_texts`: also the texts of its tokens, else perhaps none."""
        echoes: list[tuple[str, list[str]]] = []
        for prompt, tokens in zip(prompts, ids, strict=True):
            if isinstance(prompt, str) and not with_texts:
                echoes.append((prompt, []))
                continue
            texts = await self._submitter.prompt_texts(tokens, prompt if isinstance(prompt, str) else None)
            echoes.append(("".join(texts), texts))
        return echoes
