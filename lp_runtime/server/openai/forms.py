"""Answer bodies of the OpenAI API: completions and chats, whole or as server-sent events."""

from __future__ import annotations

import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lp_runtime.chat.answer import message_of, parts_of
from lp_runtime.request.output import Logprob
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.openai.choice import Choice, acceptance_of, usage_of
from lp_runtime.server.openai.common import StreamOptions
from lp_runtime.text.token_text import TokenTexts
from lp_runtime.utils.json_line import to_json

LAST_EVENT = "data: [DONE]\n\n"
COMMENT = ": waiting\n\n"  # clients ignore it; without it, fetch of Node.js ends a stream after 300 silent seconds


def event(body: Mapping[str, object], name: str | None = None) -> str:
    line = f"data: {to_json(body)}\n\n"
    return line if name is None else f"event: {name}\n{line}"


class Form(ABC):
    """The format of an answer."""

    def __init__(self, model: str, texts: TokenTexts):
        self.model, self.texts = model, texts

    def usage(self, choices: list[Choice]) -> dict[str, Any]:
        """Return OpenAI's `usage`. Tokens of the reasoning text are counted by its bytes, from the first token on."""
        for choice in choices:
            while choice.uncounted_bytes > 0 and choice.num_reasoning < len(choice.tokens):
                choice.uncounted_bytes -= len(self.texts.bytes_of(choice.tokens[choice.num_reasoning]))
                choice.num_reasoning += 1
        usage = usage_of(choices)
        usage["completion_tokens_details"]["reasoning_tokens"] = sum(choice.num_reasoning for choice in choices)
        return usage

    @abstractmethod
    def whole(self, choices: list[Choice]) -> dict[str, object]:
        """Return the JSON body of an answer that is not streamed."""

    @abstractmethod
    def opening(self, choices: list[Choice]) -> Iterator[str]:
        """Yield the events of a streamed answer that come before any new text."""

    @abstractmethod
    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        """Yield the events for new text of a choice or its end; `new` slices the new ones of `choice.tokens`."""

    @abstractmethod
    def closing(self, choices: list[Choice]) -> Iterator[str]:
        """Yield the events of a streamed answer that come after all text, once all choices have ended."""

    def waiting(self) -> str:
        """Return an event that keeps a stream's connection open until there is new text; by default a comment."""
        return COMMENT

    def failure(self, error: ApiError) -> Iterator[str]:
        """Yield the events for an error after the answer began."""
        yield event(error.body)
        yield LAST_EVENT


class ChoicesForm(Form):
    """Base of the formats of completions and chats.

    `num_top`: how many of the likeliest tokens each log-probability comes with; None without log-probabilities.
    """

    prefix: str  # of the answer's id
    kind: str  # `object` of an answer that is not streamed
    chunk_kind: str  # `object` of a chunk of a streamed answer

    def __init__(self, model: str, texts: TokenTexts, num_top: int | None, stream_options: StreamOptions | None = None):
        super().__init__(model, texts)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.num_top = num_top
        self._options = stream_options or StreamOptions()

    def chunk(self, *choices: Mapping[str, object], **more: object) -> str:
        return event({**self._head, "object": self.chunk_kind, "choices": list(choices), **more})

    def chunk_of(self, choice: Choice, body: Mapping[str, object]) -> str:
        """Return the chunk of a choice before the end of the answer; its usage is that so far, or null."""
        if not self._options.include_usage:
            return self.chunk(body)
        return self.chunk(body, usage=self.usage([choice]) if self._options.continuous_usage_stats else None)

    def whole(self, choices: list[Choice]) -> dict[str, object]:
        bodies = [self.choice(choice) for choice in choices]
        usage, metrics = self.usage(choices), acceptance_of(choices)
        return {**self._head, "object": self.kind, "choices": bodies, "usage": usage, "metrics": metrics}

    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        delta = self.delta(choice, text, new)
        if choice.job.request.trace:  # our extension of the OpenAI API: where this step's tokens came from
            traced = {"found_by": choice.found_by[new], "sources": choice.sources[new]}
            delta["lookahead"] = {"tokens": len(choice.tokens[new]), **traced}
        yield self.chunk_of(choice, delta)

    def closing(self, choices: list[Choice]) -> Iterator[str]:
        if self._options.include_usage:
            yield self.chunk(usage=self.usage(choices), metrics=acceptance_of(choices))
        yield LAST_EVENT

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, object]:
        """Return the JSON of a choice in an answer that is not streamed."""

    @abstractmethod
    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        """Return the JSON of a choice in a chunk; the arguments are those of `grown`."""


class CompletionForm(ChoicesForm):
    """The form of answers to POST /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        return iter(())

    def choice(self, choice: Choice) -> dict[str, object]:
        return self.delta(choice, choice.text, slice(None))

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        new_tokens = zip(choice.tokens[new], choice.token_texts[new], choice.logprobs[new], strict=False)
        tokens: list[tuple[int, str, float | None]] = list(new_tokens)
        if not choice.shows_new:
            tokens, text = [], ""
        text, choice.prefix = choice.prefix + text, ""
        logprobs = None
        if self.num_top is not None:
            if choice.prefix_texts and choice.logprobs:
                first = choice.logprobs[0]
                values = [None, *(first.prompt if isinstance(first, Logprob) else ())]
                prompt = zip(choice.job.request.prompt_ids, choice.prefix_texts, values, strict=True)
                tokens, choice.prefix_texts = [*prompt, *tokens], ()
            logprobs = self._logprobs(choice, tokens)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason}

    def _logprobs(self, choice: Choice, tokens: Sequence[tuple[int, str, float | None]]) -> dict[str, object]:
        """Return log-probabilities of (id, text, log-probability); advance `choice.offset` past the tokens.

        With `echo` they begin with the prompt's tokens, the first without a log-probability.
        """
        ends = list(itertools.accumulate((len(text) for _, text, _ in tokens), initial=choice.offset))
        choice.offset = ends[-1]
        return {
            "tokens": [text for _, text, _ in tokens],
            "token_logprobs": [value for *_, value in tokens],
            "top_logprobs": [self._top(*token) for token in tokens],
            "text_offset": ends[:-1],
        }

    def _top(self, token: int, text: str, value: float | None) -> dict[str, float] | None:
        """Return the log-probabilities of the likeliest tokens and of the token itself, by text.

        A token whose text another one has is shown by its id, as vLLM shows tokens with `return_tokens_as_token_ids`.
        """
        if value is None:
            return None
        top: dict[str, float] = {}
        for other, each in value.top if isinstance(value, Logprob) else ():
            label = text if other == token else self.texts.label(other)
            is_used = label in top or (label == text and other != token)
            top[f"token_id:{other}" if is_used else label] = each
        return {**top, text: float(value)}


class ChatForm(ChoicesForm):
    """The form of answers to POST /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        for choice in choices:
            delta = {"role": "assistant", "content": ""}
            yield self.chunk_of(choice, {"index": choice.index, "delta": delta, "finish_reason": None})

    def choice(self, choice: Choice) -> dict[str, object]:
        return self._body(choice, "message", message_of(choice.pieces(choice.text)), slice(None))

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        return self._body(choice, "delta", parts_of(choice.pieces(text)), new)

    def _body(self, choice: Choice, name: str, parts: dict[str, object], new: slice) -> dict[str, object]:
        """Return a choice whose text has been parsed to `parts`, which are its message or delta."""
        has_calls = bool(choice.arguments) and not choice.is_call_cut
        reason = "tool_calls" if has_calls and choice.reason == "stop" else choice.reason
        return {"index": choice.index, name: parts, "logprobs": self._logprobs(choice, new), "finish_reason": reason}

    def _logprobs(self, choice: Choice, new: slice) -> dict[str, object] | None:
        if self.num_top is None:
            return None
        content = []
        tokens = zip(choice.tokens[new], choice.token_texts[new], choice.logprobs[new], strict=True)
        for place, (token, text, value) in enumerate(tokens, start=new.start or 0):
            entry = {"token": text, "logprob": float(value), "bytes": list(self._bytes(choice, token, place == 0))}
            top = value.top if isinstance(value, Logprob) else ()
            entries = [entry if other == token else self._entry(other, each) for other, each in top]
            content.append({**entry, "top_logprobs": entries})
        return {"content": content}

    def _bytes(self, choice: Choice, token: int, is_first: bool) -> bytes:
        """Return the bytes that a token of the answer has added to its text."""
        if choice.job.request.skip_special_tokens and token in self.texts.special_ids:
            return b""
        is_start = is_first and choice.job.request.is_answer  # else the text continues the prompt's
        return self.texts.bytes_at_start(token) if is_start else self.texts.bytes_of(token)

    def _entry(self, token: int, value: float) -> dict[str, object]:
        return {"token": self.texts.label(token), "logprob": value, "bytes": list(self.texts.bytes_of(token))}
