"""Answer bodies of the OpenAI API: completions and chats, whole or as server-sent events."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lp_runtime.chat.answer import message_of, parts_of
from lp_runtime.chat.pieces import ChatParser, Piece
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.request.generation import Delta
from lp_runtime.request.output import Logprob
from lp_runtime.scheduler.job import Job
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.openai.common import StreamOptions
from lp_runtime.text.token_text import TokenTexts
from lp_runtime.utils.json_line import to_json

REASONS = {"eos": "stop", "stop": "stop"}  # OpenAI's finish_reason by Generation.finish_reason; others are "length"
COPIED = "text"  # source of drafts that are copied from the prompt, the text so far, or a prediction
LAST_EVENT = "data: [DONE]\n\n"
COMMENT = ": waiting\n\n"  # clients ignore it; without it, fetch of Node.js ends a stream after 300 silent seconds


@dataclass
class Choice:
    """One text of an answer, which grows while its job decodes."""

    index: int
    job: Job
    trimmer: StopTrimmer
    prefix: str = ""  # still to be shown before the new text: the prompt with `echo`
    prefix_texts: Sequence[str] = ()  # of the prompt's tokens; only with `echo` and log-probabilities
    offset: int = 0  # characters of the tokens shown with log-probabilities so far
    text: str = ""  # only in answers that are not streamed
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the new tokens, as the next two; if asked for
    found_by: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # up to the first that is not final; with log-probabilities
    reason: str | None = None  # OpenAI's finish_reason; None before the end
    stop: str | None = None  # the stop string that ended the text
    parser: ChatParser | None = None  # None for plain text
    max_calls: int | None = None  # that the answer shows at most; None for no limit
    shows_new: bool = True  # with `echo` a client may ask for the prompt only, and gets one token that is not counted
    num_shown: int = 0  # new tokens that events have shown
    arguments: list[str] = field(default_factory=list)  # of the last call, piece by piece; empty without calls
    num_reasoning: int = 0  # tokens of the reasoning text
    uncounted_bytes: int = 0  # of the reasoning text, after the tokens in `num_reasoning`; see Form.usage

    @property
    def num_final(self) -> int:
        """Number of new tokens that can be shown: with log-probabilities, those whose text is final."""
        return len(self.token_texts) if self.job.request.logprobs else len(self.tokens)

    def add(self, delta: Delta) -> str:
        """Append a delta; return the text that may be shown now."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.found_by += delta.found_by or ()
        self.sources += delta.sources or ()
        self.token_texts += delta.token_texts
        return self.trimmer.add(delta.text)

    def finish(self) -> str:
        """Set `reason` and `stop` after the job has ended; return the remaining text to show."""
        generation = self.job.final_generation
        self.stop = generation.stop
        self.reason = "stop" if self.stop is not None else REASONS.get(generation.finish_reason, "length")
        return self.trimmer.finish(generation.stop)

    def pieces(self, text: str) -> list[Piece]:
        """Split new text into pieces of the answer; once the choice has ended, return all remaining pieces."""
        if self.parser is None:
            return [Piece("content", text)] if text else []
        pieces = self.parser.add(text)
        if self.reason is not None:
            pieces += self.parser.finish(self.reason == "length" or self.stop is not None)
        pieces = [each for each in pieces if self.max_calls is None or each.call < self.max_calls]
        for piece in pieces:
            if piece.kind == "reasoning":
                self.uncounted_bytes += len(piece.text.encode(errors="replace"))  # as TokenTexts does
            elif piece.kind == "arguments":
                if piece.name is not None:
                    self.arguments = []
                self.arguments.append(piece.text)
        return pieces

    @property
    def is_call_cut(self) -> bool:
        """Whether a limit or a stop string has ended the text inside the last call."""
        if (self.stop is None and self.reason != "length") or not self.arguments:
            return False
        try:
            return not isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return True


def event(body: Mapping[str, object], name: str | None = None) -> str:
    line = f"data: {to_json(body)}\n\n"
    return line if name is None else f"event: {name}\n{line}"


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    """Return OpenAI's `usage` of the choices, without reasoning; samples of one prompt count its tokens once."""
    prompts = {id(choice.job.request.prompt_ids): len(choice.job.request.prompt_ids) for choice in choices}
    num_new, num_prompt = sum(len(choice.tokens) for choice in choices if choice.shows_new), sum(prompts.values())
    num_fed, num_accepted = _num_drafted([choice for choice in choices if choice.job.request.prediction], COPIED)
    # Cached tokens of each prompt: those of its first sample only, because later samples may hit what it cached.
    cached: dict[int, int] = {}
    for choice in choices:
        if choice.job.generation is not None:
            cached.setdefault(id(choice.job.request.prompt_ids), choice.job.generation.cached_tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_fed - num_accepted,
        },
    }


def _num_drafted(choices: list[Choice], source: str | None = None) -> tuple[int, int]:
    """Return (draft tokens fed, draft tokens accepted) of ended choices, of one source or of all."""
    num_fed = num_accepted = 0
    for choice in choices:
        if choice.job.generation is not None:
            counts = choice.job.generation.counts
            for name, fed, accepted in zip(counts.sources, counts.fed, counts.accepted, strict=True):
                if source in (None, name):
                    num_fed += sum(fed)
                    num_accepted += sum(accepted)
    return num_fed, num_accepted


def acceptance_of(choices: list[Choice]) -> dict[str, object]:
    """Return drafting statistics of the choices, in the format of vLLM's per-request metrics."""
    num_steps = sum(choice.job.generation.steps for choice in choices if choice.job.generation is not None)
    num_fed, num_accepted = _num_drafted(choices)
    num_new = sum(len(choice.tokens) for choice in choices)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": num_new / max(1, num_steps),
            "draft_acceptance_rate": num_accepted / max(1, num_fed),
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_fed,
        }
    }


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
