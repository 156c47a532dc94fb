"""Answer bodies of POST /v1/messages: blocks of thinking, text and tool use, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic_core import from_json

from lp_runtime.chat.pieces import Piece
from lp_runtime.server.http.errors import ApiError, anthropic_error
from lp_runtime.server.openai.choice import Choice, acceptance_of
from lp_runtime.server.openai.forms import Form, event
from lp_runtime.text.token_text import TokenTexts


@dataclass
class OutputBlock:
    """A block of an answer, which grows while the answer is decoded."""

    piece: Piece  # the first one, which determines the block's type
    texts: list[str] = field(default_factory=list)  # of all pieces so far

    @property
    def text(self) -> str:
        """The text so far; of a call, the JSON of its input."""
        return "".join(self.texts)

    def body(self) -> dict[str, object]:
        """Return the block as JSON. Nothing verifies reasoning that is sent back, so its signature is empty."""
        piece = self.piece
        if piece.kind == "reasoning":
            return {"type": "thinking", "thinking": self.text, "signature": ""}
        if piece.kind == "content":
            return {"type": "text", "text": self.text}
        return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": _object_of(self.text)}

    def delta(self, text: str) -> dict[str, object]:
        if self.piece.kind == "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        if self.piece.kind == "content":
            return {"type": "text_delta", "text": text}
        return {"type": "input_json_delta", "partial_json": text}


class MessagesForm(Form):
    """The form of answers to POST /v1/messages.

    `max_tokens` is the request's, or the server's limit; an answer with a lower limit had no more room in the context.
    """

    def __init__(self, model: str, texts: TokenTexts, max_tokens: int | None):
        super().__init__(model, texts)
        self._max_tokens = max_tokens
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[OutputBlock] = []

    def whole(self, choices: list[Choice]) -> dict[str, object]:
        (choice,) = choices
        for _ in self.grown(choice, choice.text, slice(None)):
            pass
        content = [block.body() for block in self._blocks]
        return {**self._message(choice), "content": content, **self._end(choice), "metrics": acceptance_of(choices)}

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        (choice,) = choices
        yield _event("message_start", message=self._message(choice))
        yield self.waiting()

    def waiting(self) -> str:
        return _event("ping")

    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        for piece in choice.pieces(text):
            if not self._blocks or piece.kind != self._blocks[-1].piece.kind or piece.name is not None:
                yield from self._end_block()
                block = OutputBlock(piece)
                self._blocks.append(block)
                yield self._block_event("content_block_start", content_block=block.body())
            if piece.text:
                block = self._blocks[-1]
                block.texts.append(piece.text)
                yield self._block_event("content_block_delta", delta=block.delta(piece.text))

    def closing(self, choices: list[Choice]) -> Iterator[str]:
        (choice,) = choices
        yield from self._end_block()
        end = self._end(choice)
        usage = end.pop("usage")
        yield _event("message_delta", delta=end, usage=usage, metrics=acceptance_of(choices))
        yield _event("message_stop")

    def failure(self, error: ApiError) -> Iterator[str]:
        yield event(anthropic_error(400 if error.status == 400 else 500, str(error)), "error")

    def _end_block(self) -> Iterator[str]:
        if not self._blocks:
            return
        if self._blocks[-1].piece.kind == "reasoning":
            yield self._block_event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        yield self._block_event("content_block_stop")

    def _block_event(self, kind: str, **fields: object) -> str:
        return _event(kind, index=len(self._blocks) - 1, **fields)

    def _message(self, choice: Choice) -> dict[str, object]:
        """Return the answer without blocks."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": self._usage(choice)}

    def _end(self, choice: Choice) -> dict[str, object]:
        """Return the fields that are known at the end of a choice."""
        if choice.reason == "length":
            is_capped = self._max_tokens is not None and choice.job.request.max_new_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_capped else "max_tokens"
        elif choice.stop is not None:
            reason = "stop_sequence"
        else:
            has_calls = any(block.piece.kind == "arguments" for block in self._blocks)
            reason = "tool_use" if has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": choice.stop, "usage": self._usage(choice)}

    def _usage(self, choice: Choice) -> dict[str, object]:
        """Return Anthropic's `usage`; its input_tokens leave out cached ones, known at the end only."""
        usage = self.usage([choice])
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": choice.num_reasoning},
        }


def _event(kind: str, **fields: object) -> str:
    return event({"type": kind, **fields}, kind)


def _object_of(text: str) -> dict[str, object]:
    """Parse a call's input: the complete part if it is cut off; {} if it is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = from_json(text, allow_partial=True)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
