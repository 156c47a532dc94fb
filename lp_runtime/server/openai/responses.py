"""Answer bodies of the OpenAI API: completions and chats, whole or as server-sent events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lp_runtime.model.tokenizer import TextStream
from lp_runtime.request.generation import Delta
from lp_runtime.request.output import Logprob
from lp_runtime.scheduler.job import Job
from lp_runtime.server.chat.chat_parser import ChatParser, Piece
from lp_runtime.server.chat.stop_trimmer import StopTrimmer
from lp_runtime.utils.json_line import to_json

REASONS = {"eos": "stop", "stop": "stop"}  # OpenAI's finish_reason by Generation.finish_reason; others are "length"
LAST_EVENT = "data: [DONE]\n\n"


@dataclass
class Choice:
    """One text of an answer, which grows while its job decodes.

    Attributes:
        prefix: text to show before the new text: the prompt with `echo`, else empty.
        is_prefix_shown: whether the prefix has been shown; streamed answers show it once, with the first text.
        offset: number of characters of the tokens shown with log-probabilities so far; None before the first.
        text: text so far; only in answers that are not streamed.
        logprobs, found_by, sources: of the new tokens so far, if asked for: see StepOutput.
        reason: OpenAI's finish_reason; None before the end.
        parser, raw: see `read_by`.
    """

    index: int
    job: Job
    trimmer: StopTrimmer
    prefix: str = ""
    is_prefix_shown: bool = False
    offset: int | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    found_by: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    reason: str | None = None
    parser: ChatParser | None = None
    raw: TextStream | None = None

    def read_by(self, parser: ChatParser | None, raw: TextStream | None) -> None:
        """Attach the parser that splits the answer into reasoning, content and tool calls; None for plain text.

        `raw` decodes tokens to text that includes special tokens, for a parser that needs them; else None.
        """
        self.parser, self.raw = parser, raw
        if raw is not None:
            self.trimmer = StopTrimmer(self.job.request.stop, is_cut=False)

    def add(self, delta: Delta) -> str:
        """Append a delta; return the text that may be shown now."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.found_by += delta.found_by or ()
        self.sources += delta.sources or ()
        text = delta.text
        if self.raw is not None:
            text = self.raw.add([token for token in delta.token_ids if token not in self.job.request.eos_token_ids])
        return self.trimmer.add(text)

    def finish(self) -> str:
        """Set `reason` after the job has ended; return the remaining text to show."""
        finish_reason = self.job.final_generation.finish_reason
        self.reason = REASONS.get(finish_reason, "length")
        rest = self.trimmer.add(self.raw.finish()) if self.raw is not None else ""
        return rest + self.trimmer.finish(finish_reason == "stop")

    def pieces(self, text: str) -> list[Piece]:
        """Split new text into pieces of the answer; once the choice has ended, return all remaining pieces."""
        if self.parser is None:
            return [Piece("content", text)] if text else []
        return self.parser.add(text) + (self.parser.finish() if self.reason is not None else [])


def event(body: Mapping[str, object], name: str | None = None) -> str:
    """Format a body as a server-sent event."""
    line = f"data: {to_json(body)}\n\n"
    return line if name is None else f"event: {name}\n{line}"


def usage_of(choices: list[Choice]) -> dict[str, object]:
    """Return OpenAI's `usage` of the choices; samples of one prompt count its tokens once."""
    prompts = {id(choice.job.request.prompt_ids): len(choice.job.request.prompt_ids) for choice in choices}
    num_new, num_prompt = sum(len(choice.tokens) for choice in choices), sum(prompts.values())
    num_fed, num_accepted = _num_drafted(choices)
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


def _num_drafted(choices: list[Choice]) -> tuple[int, int]:
    """Return (draft tokens fed, draft tokens accepted) of the choices that have ended."""
    counts = [choice.job.generation.counts for choice in choices if choice.job.generation is not None]
    return sum(int(each.fed.sum()) for each in counts), sum(int(each.accepted.sum()) for each in counts)


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
    """The format of an answer: of a completion, a chat or a response.

    `shows_tokens`: whether new tokens make an event even if they add no text, as with log-probabilities.
    """

    def __init__(self, model: str, token_text: Callable[[int], str], shows_tokens: bool = False):
        self.model = model
        self.token_text = token_text
        self.shows_tokens = shows_tokens

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
    def closing(self, choices: list[Choice], with_usage: bool) -> Iterator[str]:
        """Yield the events of a streamed answer that come after all text, once all choices have ended."""

    def failure(self, error: Mapping[str, object]) -> Iterator[str]:
        """Yield the events for an error after the answer began; `error` is the body of an ApiError."""
        yield event(error)
        yield LAST_EVENT


class ChoicesForm(Form):
    """Base of the formats of completions and chats.

    Args:
        num_top: how many of the likeliest tokens each log-probability comes with; None without log-probabilities.

    Attributes:
        prefix: prefix of the answer's id.
        kind: `object` of an answer that is not streamed.
        chunk_kind: `object` of a chunk of a streamed answer.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, token_text: Callable[[int], str], num_top: int | None):
        super().__init__(model, token_text, num_top is not None)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.num_top = num_top

    def chunk(self, *choices: Mapping[str, object], **more: object) -> str:
        """Return a chunk of a streamed answer as an event."""
        return event({**self._head, "object": self.chunk_kind, "choices": list(choices), **more})

    def whole(self, choices: list[Choice]) -> dict[str, object]:
        bodies = [self.choice(choice) for choice in choices]
        usage, metrics = usage_of(choices), acceptance_of(choices)
        return {**self._head, "object": self.kind, "choices": bodies, "usage": usage, "metrics": metrics}

    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        delta = self.delta(choice, text, new)
        if choice.job.request.trace:  # our extension of the OpenAI API: where this step's tokens came from
            traced = {"found_by": choice.found_by[new], "sources": choice.sources[new]}
            delta["lookahead"] = {"tokens": len(choice.tokens[new]), **traced}
        yield self.chunk(delta)

    def closing(self, choices: list[Choice], with_usage: bool) -> Iterator[str]:
        if with_usage:
            yield self.chunk(usage=usage_of(choices), metrics=acceptance_of(choices))
        yield LAST_EVENT

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, object]:
        """Return the JSON of a choice in an answer that is not streamed."""

    @abstractmethod
    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        """Return the JSON of a choice in a chunk; the arguments are those of `grown`."""


class CompletionForm(ChoicesForm):
    """The form of answers to POST /v1/completions.

    `shows_new`: whether new tokens are shown; with `echo`, a client may ask for the prompt only.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, token_text: Callable[[int], str], num_top: int | None, shows_new: bool = True):
        super().__init__(model, token_text, num_top)
        self._shows_new = shows_new

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        return iter(())

    def choice(self, choice: Choice) -> dict[str, object]:
        return self.delta(choice, choice.text, slice(None))

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        shows_prefix, choice.is_prefix_shown = bool(choice.prefix) and not choice.is_prefix_shown, True
        tokens, values = choice.tokens[new], list(choice.logprobs[new])
        if not self._shows_new:
            tokens, values, text = [], [], ""
        if shows_prefix:
            text = choice.prefix + text
        logprobs = None
        if self.num_top is not None:
            prompt: list[float | None] = []
            if choice.prefix and choice.offset is None and choice.logprobs:
                first = choice.logprobs[0]
                prompt = [None, *(first.prompt if isinstance(first, Logprob) else ())]
                tokens = [*choice.job.request.prompt_ids, *tokens]
            logprobs = self._logprobs(choice, tokens, [*prompt, *values])
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason}

    def _logprobs(self, choice: Choice, tokens: list[int], values: list[float | None]) -> dict[str, object]:
        """Return log-probabilities in the format of completions, and advance `choice.offset` past the tokens.

        With `echo`, `tokens` begins with the prompt's, and the log-probability of its first token is None.
        """
        texts = [self.token_text(token) for token in tokens]
        offset, offsets = choice.offset or 0, []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        if tokens:
            choice.offset = offset
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": [self._top(text, value) for text, value in zip(texts, values, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, text: str, value: float | None) -> dict[str, float] | None:
        """Return the log-probabilities of the likeliest tokens and of the token itself, by text."""
        if value is None:
            return None
        top: dict[str, float] = {}
        for token, each in value.top if isinstance(value, Logprob) else ():
            top.setdefault(self.token_text(token), each)
        return top | {text: float(value)}  # if several tokens have this text, the sampled one's value counts
