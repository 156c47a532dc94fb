"""POST /v1/responses: OpenAI's newer form of a chat, without anything that is kept between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from pydantic import BaseModel, ConfigDict, Field

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import RequestError
from lp_runtime.server.messages import Message
from lp_runtime.server.protocol import Common
from lp_runtime.server.responses import Choice, Form, acceptance_of, event, usage_of
from lp_runtime.server.structure import ResponseFormat, constraint_of

VERBOSITIES = (None, "medium")


class TextSettings(BaseModel):
    """Settings of the answer's text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: ResponseFormat | None = None
    verbosity: str | None = None


class Responses(Common):
    """The body of POST /v1/responses."""

    input: str | list[Message]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=0)
    previous_response_id: str | None = None
    background: bool = False
    text: TextSettings | None = None
    include: list[str] | None = None
    truncation: str | None = None

    def check(self) -> None:
        """Refuse fields that ask for what is not supported.

        Raises:
            RequestError: names the field.
        """
        refused = {
            "previous_response_id: is not supported, nothing is stored; send the whole conversation": (
                self.previous_response_id is not None
            ),
            "background=true: is not supported": self.background,
            f"include={self.include}: is not supported; leave it out": bool(self.include),
            f"truncation={self.truncation!r}: must be disabled": self.truncation not in (None, "disabled"),
            "text.verbosity: must be medium": self.text is not None and self.text.verbosity not in VERBOSITIES,
            f"n={self.n}: must be 1": self.n != 1,
            "max_tokens: is not a field of responses; give max_output_tokens": self.max_tokens is not None,
            "input: is empty": not self.input,
        }
        for message, is_refused in refused.items():
            if is_refused:
                raise RequestError(message)

    def constraint(self) -> ConstraintConfig | None:
        """Return what the text must be; None for any text.

        Raises:
            ConstraintError: it is invalid.
        """
        if self.text is None or self.text.format is None:
            return super().constraint()
        return constraint_of(self.text.format, self.structured_outputs)

    def messages(self) -> list[dict[str, object]]:
        """Return the conversation as chat templates take it.

        Raises:
            RequestError: a field asks for what is not supported.
        """
        self.check()
        given: list[dict[str, object]] = []
        if self.instructions is not None:
            given.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*given, {"role": "user", "content": self.input}]
        return given + [_chat_message(message) for message in self.input]

    def length(self) -> int | None:
        """Return how many tokens to generate at most; None for the default."""
        return self.max_output_tokens


def _chat_message(message: Message) -> dict[str, object]:
    """Return an input item as a message of a chat.

    Raises:
        RequestError: the item is no message.
    """
    plain = message.plain()
    kind = plain.pop("type", "message")
    if kind != "message":
        raise RequestError(f"input: items of type {kind!r} are not supported")
    for name in ("id", "status"):
        plain.pop(name, None)
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


class ResponsesForm(Form):
    """The form of answers to POST /v1/responses.

    Args:
        model: the model's name for clients.
        token_text: returns a token's text.
        body: what the client sent.
    """

    def __init__(self, model: str, token_text: Callable[[int], str], body: Responses):
        super().__init__(model, token_text)
        self._body = body
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0
        self._shown = ""
        given = None if body.text is None else body.text.format
        self._format = {"type": "text"} if given is None else given.model_dump(exclude_none=True, by_alias=True)

    def whole(self, choices: list[Choice]) -> dict[str, object]:
        (choice,) = choices
        is_cut = choice.reason == "length"
        usage = usage_of(choices)
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(choice.text or self._shown, "incomplete" if is_cut else "completed")],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": acceptance_of(choices),
        }

    def opening(self, choices: list[Choice]) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        item = self._item("", "in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def grown(self, choice: Choice, text: str, new: slice) -> Iterator[str]:
        if text:
            self._shown += text
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, choices: list[Choice], with_usage: bool) -> Iterator[str]:
        response = self.whole(choices)
        yield self._event("response.output_text.done", **self._place(), text=self._shown, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(self._shown))
        item = self._item(self._shown, str(response["status"]))
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: Mapping[str, object]) -> Iterator[str]:
        """Yield the event that says that an answer has failed after it began."""
        details = error["error"]
        assert isinstance(details, Mapping)  # ApiError makes it
        told = {"code": "server_error", "message": details["message"]}
        yield self._event("response.failed", response=self._response("failed") | {"error": told})

    def _place(self) -> dict[str, object]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: object) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def _item(self, text: str, status: str) -> dict[str, object]:
        content = [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str) -> dict[str, object]:
        body = self._body
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "text": {"format": self._format},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }


def _part(text: str) -> dict[str, object]:
    """Return a part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
