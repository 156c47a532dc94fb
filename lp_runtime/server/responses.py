"""The forms of an answer: a completion's and a chat's, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from lp_runtime.engine.generation import Delta
from lp_runtime.scheduler.scheduler import Job
from lp_runtime.server.stop_trimmer import StopTrimmer

REASONS = {"eos": "stop", "stop": "stop"}  # of ours, in OpenAI's terms; all others are "length"
LAST_EVENT = "data: [DONE]\n\n"


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

    def add(self, piece: Delta) -> str:
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


def event(body: dict) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Form(ABC):
    """The shape of an answer: a completion's or a chat's.

    Args:
        model: its name, as clients call it.
        token_text: gives a token as text, for log-probabilities.
        with_logprobs: whether these are told.
    """

    prefix: str
    kind: str

    def __init__(self, model: str, token_text: Callable[[int], str], with_logprobs: bool):
        self._token_text = token_text
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
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
            texts = [self._token_text(token) for token in choice.tokens[new]]
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
        texts = [(self._token_text(token), value) for token, value in pairs]
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in texts
        ]
        return {"content": content}
