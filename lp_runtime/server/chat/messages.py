"""Messages of a conversation: validation, and conversion for chat templates."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict


class ContentPart(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: dict[str, object] | None = None
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class Message(BaseModel):
    """A message of a conversation; unknown fields are passed to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, object]:
        """Convert the message to the dict that chat templates expect, with its content as one string."""
        content = "" if self.content is None else joined(self.content)
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        # An empty list is left out, because templates only check whether the key exists.
        if isinstance(calls := more.pop("tool_calls", None), list) and calls:
            more["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return {**more, "role": self.role, "content": content}


def joined(content: str | list[ContentPart]) -> str:
    """Join a message's content to one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _with_parsed_arguments(call: object) -> object:
    """Parse a call's JSON arguments to the object that templates expect; keep malformed calls as they are."""
    try:
        function = call["function"]  # type: ignore[index]
        arguments = json.loads(function["arguments"].strip() or "{}")
        arguments = {} if arguments is None else arguments
        return {**call, "function": {**function, "arguments": arguments}}  # type: ignore[dict-item]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return call
