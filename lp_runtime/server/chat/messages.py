"""Messages of a conversation, as clients send them and as chat templates take them."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict


class ContentPart(BaseModel):
    """A part of a message's content; text alone is supported."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: dict[str, object] | None = None
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class Message(BaseModel):
    """A message of a conversation. Unknown fields are passed on to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, object]:
        """Return the message as chat templates take it, with its content as one text."""
        content = "" if self.content is None else joined(self.content)
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if isinstance(calls := more.pop("tool_calls", None), list) and calls:  # templates ask whether there are any
            more["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return {**more, "role": self.role, "content": content}


def joined(content: str | list[ContentPart]) -> str:
    """Return a message's content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _with_parsed_arguments(call: object) -> object:
    """Return a call of an earlier answer with its arguments as an object, as chat templates take it."""
    try:
        function = call["function"]  # type: ignore[index]
        arguments = json.loads(function["arguments"].strip() or "{}")
        arguments = {} if arguments is None else arguments
        return {**call, "function": {**function, "arguments": arguments}}  # type: ignore[dict-item]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return call
