"""Answers in the form of the OpenAI API: completions and chats, whole or as server-sent events."""

from __future__ import annotations

import json
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

REASONS = {"eos": "stop", "stop": "stop"}  # OpenAI's finish_reason by this package's; all others are "length"
LAST_EVENT = "data: [DONE]\n\n"


@dataclass
class Choice:
    """One of the texts of an answer, as it grows.

    Attributes:
        index: number of the text in the answer.
        job: decodes the text.
        trimmer: removes stop strings.
        prefix: text that is shown before the new one: with `echo`, the prompt.
        is_prefix_shown: whether it has been shown; the first events of a streamed answer may have nothing to show.
        offset: characters of the tokens so far that have been shown with log-probabilities; None before the first.
        text: text so far; for answers that are not streamed.
        tokens: new token ids so far.
        logprobs: log-probabilities of the tokens, if asked for.
        found_by: ranks of the replicas that verified the tokens, if asked for.
        sources: where the tokens came from, if asked for: see StepOutput.
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
        """Have the text taken apart.

        Args:
            parser: takes the text apart; None where the answer is its text.
            raw: decodes the tokens, special ones included, where the parser must see those; None elsewhere.
        """
        self.parser, self.raw = parser, raw
        if raw is not None:
            self.trimmer = StopTrimmer(self.job.request.stop, is_cut=False)

    def add(self, delta: Delta) -> str:
        """Append a delta; return the text that can be shown now."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.found_by += delta.found_by or ()
        self.sources += delta.sources or ()
        text = delta.text
        if self.raw is not None:
            text = self.raw.add([token for token in delta.token_ids if token not in self.job.request.eos_token_ids])
        return self.trimmer.add(text)

    def finish(self) -> str:
        """Set the finish_reason of a job that has ended; return the text that is left to show."""
        finish_reason = self.job.final_generation.finish_reason
        self.reason = REASONS.get(finish_reason, "length")
        rest = self.trimmer.add(self.raw.finish()) if self.raw is not None else ""
        return rest + self.trimmer.finish(finish_reason == "stop")

    def pieces(self, text: str) -> list[Piece]:
        """Return the pieces of the answer that a new text completes; all that are left once the choice has ended."""
        if self.parser is None:
            return [Piece("content", text)] if text else []
        return self.parser.add(text) + (self.parser.finish() if self.reason is not None else [])


def to_json(body: Mapping[str, object]) -> str:
    """Return a body as JSON; lone surrogates that a client has sent stay escapes, since UTF-8 has none."""
    return json.dumps(body, ensure_ascii=False).encode(errors="backslashreplace").decode()


def event(body: Mapping[str, object], name: str | None = None) -> str:
    """Return a JSON body as a server-sent event, with the event's name if it has one."""
    line = f"data: {to_json(body)}\n\n"
    return line if name is None else f"event: {name}\n{line}"


def usage_of(choices: list[Choice]) -> dict[str, object]:
    """Return how many tokens the prompts and the choices have; samples of one prompt count it once."""
    prompts = {id(choice.job.request.prompt_ids): len(choice.job.request.prompt_ids) for choice in choices}
    num_new, num_prompt = sum(len(choice.tokens) for choice in choices), sum(prompts.values())
    num_fed, num_accepted = _num_drafted(choices)
    cached: dict[int, int] = {}  # of each prompt, what its first sample has read; the others may read that one's
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
    """Return how many draft tokens were fed and accepted for choices that have ended."""
    counts = [choice.job.generation.counts for choice in choices if choice.job.generation is not None]
    return sum(int(each.fed.sum()) for each in counts), sum(int(each.accepted.sum()) for each in counts)


def acceptance_of(choices: list[Choice]) -> dict[str, object]:
    """Return how drafting went, in the form of vLLM's per-request metrics."""
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
    """The form of an answer: a completion's, a chat's or a response's.

    Args:
        model: the model's name for clients.
        token_text: returns a token's text, for log-probabilities.

    Attributes:
        shows_tokens: whether tokens without text of their own are shown, as with log-probabilities.
    """

    def __init__(self, model: str, token_text: Callable[[int], str], shows_tokens: bool = False):
        self.model, self.token_text, self.shows_tokens = model, token_text, shows_tokens

    @abstractmethod
    def whole(self, choices: list[Choice]) -> dict[str, object]:
        """Return an answer that is not streamed."""

    @abstractmethod
    def opening(self, choices: list[Choice]) -> Iterator[str]:
        """Yield the events of a streamed answer that come before any new text."""

    @abstractmethod
    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        """Yield the events that say that a choice has grown or ended.

        Args:
            choice: the choice.
            text: the new text to show.
            new: where the new tokens are in `choice.tokens`.
        """

    @abstractmethod
    def closing(self, choices: list[Choice], with_usage: bool) -> Iterator[str]:
        """Yield the events of a streamed answer that come after all text.

        Args:
            choices: all have ended.
            with_usage: whether the client has asked for usage.
        """

    def failure(self, error: Mapping[str, object]) -> Iterator[str]:
        """Yield the events that say that an answer has failed after it began.

        Args:
            error: body of the error.
        """
        yield event(error)
        yield LAST_EVENT


class ChoicesForm(Form):
    """What the forms of completions and chats have in common.

    Args:
        model: the model's name for clients.
        token_text: returns a token's text, for log-probabilities.
        num_top: how many of the likeliest tokens each log-probability comes with; None without log-probabilities.

    Attributes:
        prefix: what the answer's id begins with.
        kind: OpenAI's name of the answer's type.
        chunk_kind: OpenAI's name of a chunk's type.
        num_top: see Args.
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
        if choice.job.request.trace:  # beyond the OpenAI API: the tokens of this step
            traced = {"found_by": choice.found_by[new], "sources": choice.sources[new]}
            delta["lookahead"] = {"tokens": len(choice.tokens[new]), **traced}
        yield self.chunk(delta)

    def closing(self, choices: list[Choice], with_usage: bool) -> Iterator[str]:
        if with_usage:
            yield self.chunk(usage=usage_of(choices), metrics=acceptance_of(choices))
        yield LAST_EVENT

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, object]:
        """Return a choice of an answer that is not streamed."""

    @abstractmethod
    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        """Return a choice of a chunk; arguments as in `grown`."""


class CompletionForm(ChoicesForm):
    """The form of answers to POST /v1/completions.

    Args:
        model, token_text, num_top: see ChoicesForm.
        shows_new: whether new tokens are shown; with `echo` a client may ask for none.
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
        """Return log-probabilities as completions have them.

        Args:
            choice: whose `offset` goes on behind the tokens.
            tokens: token ids; those of a prompt, too, where they come first.
            values: log-probability of each; None for the first of a prompt.
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
        """Return the likeliest tokens' log-probabilities by their text, and the token's own."""
        if value is None:
            return None
        top: dict[str, float] = {}
        for token, each in value.top if isinstance(value, Logprob) else ():
            top.setdefault(self.token_text(token), each)
        return top | {text: float(value)}  # of several tokens with one text, the one that came
