"""Answers in the form of the OpenAI API: completions and chats, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lp_runtime.engine.generation import Delta
from lp_runtime.scheduler.job import Job
from lp_runtime.server.stop_trimmer import StopTrimmer

REASONS = {"eos": "stop", "stop": "stop"}  # OpenAI's finish_reason by this package's; all others are "length"
LAST_EVENT = "data: [DONE]\n\n"


@dataclass
class Choice:
    """One of the texts of an answer, as it grows.

    Attributes:
        index: number of the text in the answer.
        job: decodes the text.
        trimmer: removes stop strings.
        text: text so far; for answers that are not streamed.
        tokens: new token ids so far.
        logprobs: log-probabilities of the tokens, if asked for.
        found_by: ranks of the replicas that verified the tokens, if asked for.
        reason: OpenAI's finish_reason; None before the end.
    """

    index: int
    job: Job
    trimmer: StopTrimmer
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    found_by: list[int] = field(default_factory=list)
    reason: str | None = None

    def add(self, delta: Delta) -> str:
        """Append a delta; return the text that can be shown now."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.found_by += delta.found_by or ()
        return self.trimmer.add(delta.text)

    def finish(self) -> str:
        """Set the finish_reason of a job that has ended; return the text that is left to show."""
        finish_reason = self.job.final_generation.finish_reason
        self.reason = REASONS.get(finish_reason, "length")
        return self.trimmer.finish(finish_reason == "stop")


def event(body: Mapping[str, object]) -> str:
    """Return a JSON body as a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Form(ABC):
    """The form of an answer: a completion's or a chat's.

    Args:
        model: the model's name for clients.
        token_text: returns a token's text, for log-probabilities.
        with_logprobs: whether the answer has log-probabilities.

    Attributes:
        prefix: what the answer's id begins with.
        kind: OpenAI's name of the answer's type.
        with_logprobs: see Args.
    """

    prefix: str
    kind: str

    def __init__(self, model: str, token_text: Callable[[int], str], with_logprobs: bool):
        self._token_text = token_text
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.with_logprobs = with_logprobs

    def usage(self, choices: list[Choice]) -> dict[str, int]:
        """Return how many tokens the prompts and the choices have; samples of one prompt count it once."""
        prompts = {id(choice.job.request.prompt_ids): len(choice.job.request.prompt_ids) for choice in choices}
        num_new = sum(len(choice.tokens) for choice in choices)
        num_prompt = sum(prompts.values())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def opening(self, choices: list[Choice]) -> list[dict[str, object]]:
        """Return the chunks of a streamed answer that come before any text."""
        return []

    def chunk_kind(self) -> str:
        """Return OpenAI's name of a chunk's type."""
        return self.kind

    def usage_chunk(self, choices: list[Choice]) -> dict[str, object]:
        """Return the last chunk of a streamed answer whose client asked for usage."""
        return {**self._head, "object": self.chunk_kind(), "choices": [], "usage": self.usage(choices)}

    def whole(self, choices: list[Choice]) -> dict[str, object]:
        """Return an answer that is not streamed."""
        bodies = [self.choice(choice) for choice in choices]
        return {**self._head, "object": self.kind, "choices": bodies, "usage": self.usage(choices)}

    def chunk(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        """Return a chunk of a streamed answer.

        Args:
            choice: the choice that has grown.
            text: the new text to show.
            new: where the new tokens are in `choice.tokens`.
        """
        delta = self.delta(choice, text, new)
        if choice.job.request.trace:  # beyond the OpenAI API: the tokens of this step
            delta["lookahead"] = {"tokens": len(choice.tokens[new]), "found_by": choice.found_by[new]}
        return {**self._head, "object": self.chunk_kind(), "choices": [delta]}

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, object]:
        """Return a choice of an answer that is not streamed."""

    @abstractmethod
    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        """Return a choice of a chunk; arguments as in `chunk`."""


class CompletionForm(Form):
    """The form of answers to POST /v1/completions."""

    prefix, kind = "cmpl", "text_completion"

    def choice(self, choice: Choice) -> dict[str, object]:
        return self.delta(choice, choice.text, slice(None))

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        logprobs = None
        if self.with_logprobs:
            texts = [self._token_text(token) for token in choice.tokens[new]]
            logprobs = {
                "tokens": texts,
                "token_logprobs": choice.logprobs[new],
                "top_logprobs": None,
                "text_offset": None,
            }
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason}


class ChatForm(Form):
    """The form of answers to POST /v1/chat/completions."""

    prefix, kind = "chatcmpl", "chat.completion"

    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def opening(self, choices: list[Choice]) -> list[dict[str, object]]:
        deltas = [
            {"index": c.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None} for c in choices
        ]
        return [{**self._head, "object": self.chunk_kind(), "choices": [delta]} for delta in deltas]

    def choice(self, choice: Choice) -> dict[str, object]:
        message = {"role": "assistant", "content": choice.text}
        logprobs = self._logprobs(choice, slice(None))
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def delta(self, choice: Choice, text: str, new: slice) -> dict[str, object]:
        delta = {"content": text} if text else {}
        logprobs = self._logprobs(choice, new)
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.reason}

    def _logprobs(self, choice: Choice, new: slice) -> dict[str, object] | None:
        if not self.with_logprobs:
            return None
        pairs = zip(choice.tokens[new], choice.logprobs[new], strict=True)
        texts = [(self._token_text(token), value) for token, value in pairs]
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in texts
        ]
        return {"content": content}
