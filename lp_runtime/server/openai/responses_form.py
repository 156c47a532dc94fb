"""Answer bodies of POST /v1/responses: items of reasoning, text and calls, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lp_runtime.chat.pieces import Piece
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.openai.choice import Choice, acceptance_of
from lp_runtime.server.openai.forms import Form, event
from lp_runtime.server.openai.responses_api import Responses
from lp_runtime.server.openai.responses_tools import shown_names
from lp_runtime.text.token_text import TokenTexts

# (type, id prefix) of an item, by the kind of its pieces.
ITEMS = {"reasoning": ("reasoning", "rs_"), "content": ("message", "msg_"), "arguments": ("function_call", "fc_")}
# Type of the one part of an item's content, by the kind of its pieces.
PARTS = {"reasoning": "reasoning_text", "content": "output_text"}


@dataclass
class OutputItem:
    """An item of an answer, which grows while the answer is decoded."""

    piece: Piece  # the first one, which determines the item's type; its name is the function's own
    namespace: str | None = None  # of a call's function
    texts: list[str] = field(default_factory=list)  # of all pieces so far
    item_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.item_id = f"{ITEMS[self.piece.kind][1]}{uuid.uuid4().hex}"

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return "".join(self.texts)

    @property
    def event_prefix(self) -> str:
        """Prefix of the names of the events that carry the item's text."""
        return "function_call_arguments" if self.piece.kind == "arguments" else PARTS[self.piece.kind]

    def part(self) -> dict[str, object]:
        """Return the one part of the content of a message or reasoning item."""
        kind = PARTS[self.piece.kind]
        more: dict[str, object] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        return {"type": kind, "text": self.text, **more}

    def body(self, status: str, has_content: bool = True) -> dict[str, object]:
        """Return the item as JSON; `status` is in_progress, completed or incomplete."""
        piece = self.piece
        head = {"id": self.item_id, "type": ITEMS[piece.kind][0], "status": status}
        if piece.kind == "arguments":
            place = {} if self.namespace is None else {"namespace": self.namespace}
            return {**head, "call_id": piece.call_id, **place, "name": piece.name, "arguments": self.text}
        content = [self.part()] if has_content else []
        return {**head, **({"role": "assistant"} if piece.kind == "content" else {"summary": []}), "content": content}


class ResponsesForm(Form):
    """The form of answers to POST /v1/responses.

    `body` is the request's body, whose settings the answer repeats.
    """

    def __init__(self, model: str, texts: TokenTexts, body: Responses):
        super().__init__(model, texts)
        self._body = body
        self._paths = {shown: path for path, shown in shown_names(body.tools).items()}
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._num_events = 0
        self._items: list[OutputItem] = []

    def whole(self, choices: list[Choice]) -> dict[str, object]:
        (choice,) = choices
        for _ in self.grown(choice, choice.text, slice(None)):
            pass
        for _ in self._end(choice):
            pass
        return self._ended(choice)

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        for piece in choice.pieces(text):
            if not self._items or piece.kind != self._items[-1].piece.kind or piece.name is not None:
                yield from self._end_item("completed")
                yield from self._begin_item(piece)
            if piece.text:
                item = self._items[-1]
                item.texts.append(piece.text)
                more: dict[str, object] = {"logprobs": []} if piece.kind == "content" else {}
                yield self._event(f"response.{item.event_prefix}.delta", **self._place(), delta=piece.text, **more)

    def closing(self, choices: list[Choice]) -> Iterator[str]:
        (choice,) = choices
        yield from self._end(choice)
        response = self._ended(choice)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> Iterator[str]:
        reported = {"code": "server_error", "message": str(error)}
        yield self._event("response.failed", response=self._response("failed") | {"error": reported})

    def _begin_item(self, piece: Piece) -> Iterator[str]:
        namespace, name = self._paths.get(piece.name or "", (None, piece.name))
        item = OutputItem(replace(piece, name=name), namespace)
        self._items.append(item)
        body = item.body("in_progress", False)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=body)
        if piece.kind != "arguments":
            yield self._event("response.content_part.added", **self._place(), part=item.part())

    def _end_item(self, status: str) -> Iterator[str]:
        if not self._items:
            return
        item, place = self._items[-1], self._place()
        if item.piece.kind == "arguments":
            name = item.piece.name
            yield self._event(f"response.{item.event_prefix}.done", **place, name=name, arguments=item.text)
        else:
            more: dict[str, object] = {"logprobs": []} if item.piece.kind == "content" else {}
            yield self._event(f"response.{item.event_prefix}.done", **place, text=item.text, **more)
            yield self._event("response.content_part.done", **place, part=item.part())
        output_index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=output_index, item=item.body(status))

    def _end(self, choice: Choice) -> Iterator[str]:
        """End the last item; an answer without items gets an empty message."""
        if not self._items:
            yield from self._begin_item(Piece("content", ""))
        yield from self._end_item(self._last_status(choice))

    def _place(self) -> dict[str, object]:
        """Return the event fields that locate the current item's text in the answer."""
        item, place = self._items[-1], {"output_index": len(self._items) - 1}
        return {"item_id": item.item_id, **place, **({} if item.piece.kind == "arguments" else {"content_index": 0})}

    def _event(self, kind: str, /, **fields: object) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _ended(self, choice: Choice) -> dict[str, object]:
        status, usage = _status(choice), self.usage([choice])
        num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        last = len(self._items) - 1
        bodies = [
            item.body(self._last_status(choice) if place == last else "completed")
            for place, item in enumerate(self._items)
        ]
        return {
            **self._response(status),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": bodies,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": num_reasoning},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": acceptance_of([choice]),
        }

    def _last_status(self, choice: Choice) -> str:
        """Return the status of the last item; that of a call does not depend on whether the answer is complete."""
        if self._items[-1].piece.kind == "arguments":
            return "incomplete" if choice.is_call_cut else "completed"
        return _status(choice)

    def _response(self, status: str) -> dict[str, object]:
        body = self._body
        given = None if body.text is None else body.text.format
        form = {"type": "text"} if given is None else given.model_dump(exclude_none=True, by_alias=True)
        choice: Any = body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.length(),
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "temperature": body.temperature,
            "text": {"format": form},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.reason == "length" else "completed"
