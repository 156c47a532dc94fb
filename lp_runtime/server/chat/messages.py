"""Messages of a conversation: validation, and conversion for chat templates."""

from __future__ import annotations

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
        return {**more, "role": self.role, "content": content}


def joined(content: str | list[ContentPart]) -> str:
    """Join a message's content to one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
