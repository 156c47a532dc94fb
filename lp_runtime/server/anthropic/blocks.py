"""Messages and content blocks of the Messages API, and their conversion to chat-template messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from lp_runtime.chat.conversation import REMINDER
from lp_runtime.errors import RequestError
from lp_runtime.server.openai.parts import OpenPart, not_shown, type_of

BILLING_HEADER = "x-anthropic-billing-header:"  # begins a system block of Claude Code that is not for the model
REDACTED = "redacted_thinking"  # has no readable text, and is ignored
# Types of blocks by the role of their message.
TYPES = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "tool_result": ("text",),
}


class TextBlock(OpenPart):
    type: Literal["text"]
    text: str


class ThinkingBlock(OpenPart):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(OpenPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(OpenPart):
    """The result of a call; `is_error` has no effect, because templates have no place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Block] | None = None


class OtherBlock(OpenPart):
    """A block of a type that is not known, such as what a tool of Anthropic's servers has found."""

    type: str
    content: Any = None
    tool_name: Any = None

    def text(self) -> str:
        """Return the text in the block's content; else a note that the model sees in place of the block."""
        parts = self.content if isinstance(self.content, list) else [{"text": self.content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        shown = "".join(text for text in texts if isinstance(text, str))
        return shown or (not_shown(self.type) if self.tool_name is None else f"[{self.type}: {self.tool_name}]")


def _tag(block: Any) -> str:
    kind = type_of(block)
    known = ("text", "thinking", "tool_use", "tool_result")
    return f"[{kind}]" if kind in known else "[other]"  # in brackets: see openai/parts.py


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[OtherBlock, Tag("[other]")],
    Discriminator(_tag),
]


class Turn(OpenPart):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def conversation_of(system: str | Sequence[Block], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Convert a system prompt and turns to the messages that chat templates expect.

    Consecutive turns of one role become one message. Many templates accept a system message only as the first, so later
    system turns become text of the user, inside REMINDER.
    """
    messages: list[dict[str, Any]] = []
    if text := _text_of(_without_header(_checked(system, "system", "system"))):
        messages.append({"role": "system", "content": text})
    names: dict[str, str] = {}  # of tools, by the id of their call
    for number, turn in enumerate(turns):
        place = f"messages.{number}"
        blocks = _checked(turn.content, turn.role, place, is_typed=turn.role == "user")
        if turn.role == "assistant":
            _append(messages, _answer_of(blocks))
            names |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
        else:
            # Results come first: they have to follow their calls.
            messages += [_result_of(block, names, place) for block in blocks if isinstance(block, ToolResultBlock)]
            if text := _text_of(blocks):
                _append(messages, {"role": turn.role, "content": text})
    if not messages:
        raise RequestError("messages: have no text")
    return messages


def other_types(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield the types of blocks that become text or a note for the model."""
    for turn in turns:
        for block in turn.content if isinstance(turn.content, list) else ():
            inner = block.content if isinstance(block, ToolResultBlock) else [block] if turn.role != "user" else None
            for each in inner if isinstance(inner, list) else ():
                if isinstance(each, OtherBlock) and each.type != REDACTED:
                    yield each.type


def _checked(content: str | Sequence[Block], role: str, place: str, is_typed: bool = True) -> Sequence[Block]:
    """Return a message's content as blocks; refuse types that the role does not have.

    If no user typed the content, other types become text: clients send it again with each turn, so that a refusal
    would end the conversation.
    """
    blocks: list[Block] = []
    for block in [TextBlock(type="text", text=content)] if isinstance(content, str) else content:
        if isinstance(block, OtherBlock) and not is_typed:
            if block.type != REDACTED:
                blocks.append(TextBlock(type="text", text=block.text()))
        elif block.type not in TYPES[role]:
            allowed = " or ".join(TYPES[role])
            raise RequestError(f"{place}: a block of type {block.type!r} is not supported in {role}; must be {allowed}")
        else:
            blocks.append(block)
    return blocks


def _without_header(blocks: Sequence[Block]) -> Sequence[Block]:
    """Return the blocks of a system prompt without Claude Code's billing header.

    The header differs between conversations, so prompts that begin with it would share no prefix in the cache.
    """
    return [each for each in blocks if not (isinstance(each, TextBlock) and each.text.startswith(BILLING_HEADER))]


def _text_of(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _answer_of(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks)}
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thinking
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:  # templates only check whether the key exists
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def _result_of(block: ToolResultBlock, names: dict[str, str], place: str) -> dict[str, Any]:
    """Return the message of a call's result; `names` has the tool's name by the call's id.

    It may be unknown: clients cut off the beginning of long conversations.
    """
    message = {"role": "tool", "tool_call_id": block.tool_use_id}
    if block.tool_use_id in names:
        message["name"] = names[block.tool_use_id]
    return message | {"content": _text_of(_checked(block.content or "", "tool_result", place, is_typed=False))}


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message, or join it to the last one if that has the same role."""
    if message["role"] == "system" and messages and messages[-1]["role"] != "system":
        message = {"role": "user", "content": REMINDER.format(message["content"])}
    if not messages or messages[-1]["role"] != message["role"]:
        messages.append(message)
        return
    last = messages[-1]
    last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
    if "reasoning_content" in message:
        last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
