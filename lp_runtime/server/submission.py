"""Submission of HTTP requests to the scheduler's queue, as jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lp_runtime.errors import RequestError
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.tokenizer import encode, encode_chat
from lp_runtime.replica.request_builder import RequestBuilder, RequestOptions
from lp_runtime.request.request import Request as DecodingRequest
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.chat.stop_trimmer import StopTrimmer
from lp_runtime.server.gate import GateRules
from lp_runtime.server.openai.protocol import Common
from lp_runtime.server.openai.responses import Choice
from lp_runtime.server.tracing import Tracing

log = logging.getLogger(__name__)

MAX_NAMED_FIELDS = 100  # unknown fields that the log names, each once; bounds what clients can make it write
MAX_NAME_CHARS = 60  # of such a field's name


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP routes.

    Attributes:
        name: the model's name for clients.
        max_new_tokens: tokens that a request may generate at most; None for what the model's context allows.
        queue_timeout: seconds that a request may wait in the queue; None for no limit.
        strict_fields: whether requests with unknown fields are refused.
        tool_format, reasoning: one of TOOL_FORMATS and one of REASONINGS of config.serving.
    """

    name: str
    gate: GateRules = field(default_factory=GateRules)
    max_new_tokens: int | None = None
    queue_timeout: float | None = None
    strict_fields: bool = False
    tracing: Tracing | None = None
    tool_format: str = "auto"
    reasoning: str = "auto"


class Submitter:
    """Checks requests and puts them into the scheduler's queue."""

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler, settings: ServerSettings, tokenizer: Tokenizer):
        self._scheduler = scheduler
        self._settings = settings
        self._tokenizer = tokenizer
        self._compiler = runtime.compiler
        self._builder = RequestBuilder(runtime.config, runtime.info, lambda: tokenizer, runtime.compiler)
        self._special_tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._named_fields: set[str] = set()

    def check_fields(self, body: Common, request_id: str) -> None:
        """Log each unknown field once; with `strict_fields`, refuse it."""
        unknown = body.unknown_fields()
        if unknown and self._settings.strict_fields:
            raise RequestError(f"{unknown[0]}: is not a known field")
        for name in unknown:
            shown = ascii(name)[:MAX_NAME_CHARS]
            if shown not in self._named_fields and len(self._named_fields) < MAX_NAMED_FIELDS:
                self._named_fields.add(shown)
                log.warning("request %s has an unknown field, which has no effect: %s", request_id, shown)

    def encode(self, prompt: str, split_special_tokens: bool) -> list[int]:
        """Return a prompt's token ids; with `split_special_tokens`, special tokens are encoded as plain text."""
        return encode(self._tokenizer, prompt, split_special_tokens=split_special_tokens)

    async def compile(self, options: RequestOptions) -> None:
        """Compile the options' constraint, if any, into the compiler's cache, without blocking other requests."""
        constraint = options.get("constraint")
        if constraint is None or constraint.kind is None or self._compiler.kept(constraint) is not None:
            return
        # Shielded: other requests may wait for the same compilation after this request's client has disconnected.
        await asyncio.shield(asyncio.wrap_future(self._compiler.submit(constraint)))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        split_special_tokens: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a conversation and its tools, up to the start of the model's answer."""
        return encode_chat(self._tokenizer, messages, split_special_tokens, tools)

    def submit(
        self, body: Common, prompts: Sequence[list[int]], max_new_tokens: int | None, options: RequestOptions
    ) -> list[Choice]:
        """Submit `body.n` samples of each prompt, all or none.

        `max_new_tokens` is the limit that the client asks for; None for the default.
        """
        limit = self._settings.max_new_tokens
        if limit is not None and max_new_tokens is not None and max_new_tokens > limit:
            raise RequestError(f"max_tokens={max_new_tokens}: must be at most {limit}")
        num_choices, max_jobs = len(prompts) * body.n, self._scheduler.max_jobs
        if num_choices > max_jobs:
            asked = f"n={body.n}" if len(prompts) == 1 else f"{len(prompts)} prompts x n={body.n}"
            raise RequestError(f"{asked}: must be at most {max_jobs} with max_waiting={self._scheduler.max_waiting}")
        requests: list[DecodingRequest] = []
        for prompt in prompts:
            length = max_new_tokens
            if length is not None and body.caps_length:
                length = min(length, self._builder.max_new_tokens_after(len(prompt)))
            first = self._request(prompt, length, options)
            # Greedy samples are identical: give them one sample number.
            is_sampled = first.sampling.seed is not None
            requests += [replace(first, sample=sample if is_sampled else 0) for sample in range(body.n)]
        jobs = self._scheduler.submit_all(requests, self._settings.queue_timeout, body.gpus)
        hidden = self._special_tokens if options.get("skip_special_tokens", True) else ()
        return [Choice(index, job, StopTrimmer(job.request.stop, hidden)) for index, job in enumerate(jobs)]

    def _request(self, prompt: list[int], max_new_tokens: int | None, options: RequestOptions) -> DecodingRequest:
        """Build a checked request; the server's limit caps the model's default of max_new_tokens."""
        request, limit = self._builder.build(prompt, max_new_tokens, **options), self._settings.max_new_tokens
        if limit is None or request.max_new_tokens <= limit:
            return request
        return self._builder.build(prompt, limit, **options)
