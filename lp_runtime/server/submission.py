"""Submission of HTTP requests to the scheduler's queue, as jobs."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.chat.conversation import in_strict_order
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import RequestError
from lp_runtime.model.chat_template import ChatTemplate
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.tokenizer import (
    check_variables,
    encode,
    encode_chat,
    encode_infilling,
    special_tokens,
    unknown_variables,
)
from lp_runtime.replica.request_builder import RequestBuilder
from lp_runtime.request.request import Request as DecodingRequest
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.sampling.request_processors import ChannelBudget, ReasoningBudget
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.openai.choice import Choice
from lp_runtime.server.openai.common import Common
from lp_runtime.text.harmony import ANALYSIS, END, MESSAGE
from lp_runtime.text.mark_spelling import spelling_of
from lp_runtime.text.reasoning import Reasoning
from lp_runtime.text.token_text import prompt_texts

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_NAMED_FIELDS = 100  # unknown fields that the log names, each once; bounds what clients can make it write
MAX_NAME_CHARS = 60  # of such a field's name
# Variables of templates that turn the reasoning part on or off: the usual one, and that of DeepSeek, Kimi and Granite.
SWITCH, OTHER_SWITCH = "enable_thinking", "thinking"


class Submitter:
    """Checks requests and puts them into the scheduler's queue."""

    def __init__(self, runtime: LookaheadRuntime, scheduler: Scheduler, config: ServeConfig, tokenizer: Tokenizer):
        self.chat_format = ChatFormat(ChatTemplate.of(tokenizer), config.tool_format, config.reasoning)
        self._scheduler, self._config = scheduler, config
        self._tokenizer = tokenizer
        self._compiler, self._vocabulary_size = runtime.compiler, runtime.info.vocabulary_size
        self._builder = RequestBuilder(runtime.config, runtime.info, lambda: tokenizer, runtime.compiler)
        self._special_tokens = special_tokens(tokenizer)
        self._named_fields: set[str] = set()
        self._fills_context = (
            not {"max_new_tokens", "max_length"} & runtime.info.defaults.keys()
            and (runtime.info.context_length or runtime.info.capacity) is not None
        )
        self._encoder = copy.deepcopy(tokenizer)  # two threads must not share a tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    def check_fields(self, body: Common, request_id: str) -> None:
        """Check `allowed_token_ids`. Log each unknown field once; with `strict_fields`, refuse it."""
        self._check_tokens(body.allowed_token_ids or (), " in allowed_token_ids")
        unknown = body.unknown_fields()
        if unknown and self._config.strict_fields:
            raise RequestError(f"{unknown[0]}: is not a known field")
        for name in unknown:
            self._log_once("request %s has an unknown field, which has no effect: %s", request_id, name)

    def _check_tokens(self, token_ids: Sequence[int], where: str = "") -> None:
        last = self._vocabulary_size - 1
        for token in token_ids:
            if not 0 <= token <= last:
                raise RequestError(f"token id {token}{where}: must be an integer 0 to {last}")

    def _log_once(self, message: str, *texts: str) -> None:
        """Log a message about texts that clients sent, once for each of the first MAX_NAMED_FIELDS last ones."""
        shown = [ascii(text)[:MAX_NAME_CHARS] for text in texts]
        if shown[-1] not in self._named_fields and len(self._named_fields) < MAX_NAMED_FIELDS:
            self._named_fields.add(shown[-1])
            log.warning(message, *shown)

    async def encode(
        self, prompt: str, split_special_tokens: bool, suffix: str | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Return a prompt's token ids; with `split_special_tokens`, special tokens are encoded as plain text.

        With a suffix the prompt asks for the text between both.
        """
        if suffix:
            arguments = prompt, suffix, split_special_tokens, add_special_tokens
            return await self._in_thread(encode_infilling, self._encoder, *arguments)
        return await self._in_thread(encode, self._encoder, prompt, add_special_tokens, split_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        self._check_tokens(token_ids)
        return cast(str, await self._in_thread(self._encoder.decode, token_ids))

    async def spellings(self, token_ids: list[int]) -> list[str]:
        """Return how the vocabulary spells each token."""
        return cast(list[str], await self._in_thread(self._encoder.convert_ids_to_tokens, token_ids))

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a slow function in the only thread that uses `_encoder`: a text of 1 MiB takes a second."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _compile(self, constraint: ConstraintConfig | None) -> None:
        """Compile a constraint into the compiler's cache."""
        if constraint is None or constraint.kind is None or self._compiler.kept(constraint) is not None:
            return
        # Shielded: other requests may wait for the same compilation after this request's client has disconnected.
        await asyncio.shield(asyncio.wrap_future(self._compiler.submit(constraint)))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        split_special_tokens: bool,
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        rendering: Mapping[str, bool],  # the arguments of `apply_chat_template` that are fields of requests
    ) -> list[int]:
        """Return the token ids of a conversation and its tools, up to the start of the model's answer.

        Variables of `template_kwargs` that the chat template does not have are logged, each once. A conversation that
        the template refuses is rendered with its messages `in_strict_order`.
        """
        variables = {**self._config.chat_template_kwargs, **template_kwargs}
        check_variables(variables)
        unknown = unknown_variables(self._tokenizer, [*variables, OTHER_SWITCH])
        if SWITCH in unknown and OTHER_SWITCH not in unknown:
            variables = {OTHER_SWITCH: variables.pop(SWITCH), **variables}
        for name in variables:
            if name in unknown:
                self._log_once("the chat template has no variable %s: it has no effect", name)
        messages = await self._in_thread(self.chat_format.history, messages)
        if rendering.get("continue_final_message") and messages[-1].get("tool_calls"):
            raise RequestError("messages: the last one has tool calls and cannot be continued; add their results")
        variables |= rendering
        options = split_special_tokens, tools, variables
        try:
            return await self._in_thread(encode_chat, self._encoder, messages, *options)
        except RequestError:
            ordered = in_strict_order(messages)
            if ordered == messages:
                raise
            return await self._in_thread(encode_chat, self._encoder, ordered, *options)

    async def reasoning_budget(self, marks: Reasoning, num_prompt: int, num_tokens: int) -> LogitsProcessor:
        """Return the processor that ends the reasoning part of an answer after some tokens."""
        if marks.begin == "":  # harmony
            channel, message, end = (encode(self._tokenizer, mark, False) for mark in (ANALYSIS, MESSAGE, END))
            return ChannelBudget(num_prompt, channel, message, end, num_tokens)
        spelling = await self._in_thread(spelling_of, self._encoder, marks.begin or "", marks.end)
        return ReasoningBudget(num_prompt, spelling, num_tokens)

    async def with_bad_words(self, sampling: SamplingConfig, words: Sequence[str]) -> SamplingConfig:
        """Return sampling settings that exclude words, at the beginning of a text and after a space."""
        texts = [text for word in words for text in (word, f" {word}")]
        spelled = [
            await self._in_thread(encode, self._encoder, text, False, False, "a text of bad_words") for text in texts
        ]
        ids = [list(each) for each in dict.fromkeys(map(tuple, spelled)) if each]
        return replace(sampling, bad_words_ids=[*(sampling.bad_words_ids or ()), *ids]) if ids else sampling

    async def prepare(self, options: RequestOptions) -> None:
        """Do the slow work of building requests once, without blocking others: constraint, stops, prediction."""
        await self._compile(options.get("constraint"))
        if stop := options.get("stop"):
            await self._in_thread(self._builder.check_stops, stop, self._encoder)
        if isinstance(prediction := options.get("prediction"), str):
            arguments = (self._encoder, prediction, False, False, "the prediction")
            options["prediction"] = await self._in_thread(encode, *arguments) if prediction else []

    async def prompt_texts(self, token_ids: Sequence[int], text: str | None) -> list[str]:
        """Return the texts of a prompt's tokens; see token_text.prompt_texts."""
        return await self._in_thread(prompt_texts, self._encoder, token_ids, text)

    def submit(self, body: Common, prompts: Sequence[list[int]], options: RequestOptions) -> list[Choice]:
        """Submit `body.n` samples of each prompt, all or none."""
        max_jobs = self._scheduler.max_jobs
        if len(prompts) * body.n > max_jobs:
            asked = f"n={body.n}" if len(prompts) == 1 else f"{len(prompts)} prompts x n={body.n}"
            raise RequestError(f"{asked}: must be at most {max_jobs} with max_waiting={self._scheduler.max_waiting}")
        requests: list[DecodingRequest] = []
        for prompt in prompts:
            first = self._request(prompt, self._length(body, len(prompt)), options)
            # Greedy samples are identical: give them one sample number.
            is_sampled = first.sampling.seed is not None
            requests += [replace(first, sample=sample if is_sampled else 0) for sample in range(body.n)]
        jobs = self._scheduler.submit_all(requests, self._config.queue_timeout, body.gpus)
        hidden = self._special_tokens if jobs[0].request.skip_special_tokens else ()
        stops = () if body.include_stop_str_in_output else jobs[0].request.stop
        return [Choice(index, job, StopTrimmer(stops, hidden)) for index, job in enumerate(jobs)]

    def _length(self, body: Common, num_prompt: int) -> int | None:
        """Return how many tokens a request may generate; None for the default.

        The server's limit shortens answers and refuses none: Qwen Code and Open WebUI ask for fixed lengths.
        """
        asked = body.length()
        if asked is None and not (body.fills_context and self._fills_context):
            return None
        limits = [asked, self._config.max_new_tokens]
        if asked is None or body.caps_length:
            limits.append(self._builder.max_new_tokens_after(num_prompt))
        return min(limit for limit in limits if limit is not None)

    def _request(self, prompt: list[int], max_new_tokens: int | None, options: RequestOptions) -> DecodingRequest:
        """Build a checked request; the server's limit caps the model's default of max_new_tokens."""
        request, limit = self._builder.build(prompt, max_new_tokens, **options), self._config.max_new_tokens
        if limit is None or request.max_new_tokens <= limit:
            return request
        return self._builder.build(prompt, limit, **options)
