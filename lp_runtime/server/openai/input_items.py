"""Input items of /v1/responses, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from lp_runtime.errors import RequestError
from lp_runtime.server.openai.parts import ContentPart, Message, OpenPart, joined, not_shown, type_of, with_notes
from lp_runtime.server.openai.responses_tools import FunctionPath

REFERENCES = ("item_reference",)  # types of items whose content OpenAI's servers keep


class FunctionCall(OpenPart):
    """A call; of a custom tool, with its plain text as `input`."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = Field(validation_alias=AliasChoices("arguments", "input"))


class FunctionCallOutput(OpenPart):
    """The result of a call; without `call_id`, which Codex sends, something the client did by itself."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    name: str | None = None
    output: Annotated[str | list[ContentPart], BeforeValidator(with_notes)]


class ReasoningText(OpenPart):
    text: str


class Reasoning(OpenPart):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class OtherItem(OpenPart):
    """An item of a type that is not known, such as a call of a tool that OpenAI's servers ran; a note stands for it."""

    type: str


TAGS = {kind: kind for kind in ("message", "function_call", "function_call_output", "reasoning")}
TAGS |= {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}


def _tag(item: Any) -> str:
    kind = type_of(item)
    return f"[{TAGS.get('message' if kind is None else str(kind), 'other')}]"  # in brackets: see parts.py


InputItem = Annotated[
    Annotated[Message, Tag("[message]")]
    | Annotated[FunctionCall, Tag("[function_call]")]
    | Annotated[FunctionCallOutput, Tag("[function_call_output]")]
    | Annotated[Reasoning, Tag("[reasoning]")]
    | Annotated[OtherItem, Tag("[other]")],
    Discriminator(_tag),
]


Item = Message | FunctionCall | FunctionCallOutput | Reasoning | OtherItem


def other_types(items: Sequence[Item]) -> Iterator[str]:
    """Yield the types of items that become a note for the model."""
    return (item.type for item in items if isinstance(item, OtherItem))


def messages_of(items: Sequence[Item], shown: Mapping[FunctionPath, str]) -> list[dict[str, Any]]:
    """Convert input items to the messages of a conversation.

    Text and calls of one answer become one message of the assistant. Its reasoning becomes that message's
    `reasoning_content`, which templates may show or leave out. `shown` has the names that the model sees of functions.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        if isinstance(item, OtherItem) and item.type in REFERENCES:
            raise RequestError(
                f"input: items of type {item.type!r} are not supported, responses are not stored; send the items"
                " themselves, as clients do with store=false"
            )
        if isinstance(item, FunctionCallOutput):
            messages.append(_result_of(item, names))
        elif isinstance(item, Message):
            _add_message(messages, item)
        else:
            if isinstance(item, FunctionCall):
                names[item.call_id] = shown.get((item.namespace, item.name), item.name)
            _add_to_answer(messages, item, names)
    messages = [{"content": "", **each} for each in messages if each.keys() > {"role"}]
    if not messages:
        raise RequestError("input: is empty")
    return messages


def _result_of(item: FunctionCallOutput, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the message of a call's result; `names` has the tool's name by the call's id.

    It may be unknown: clients cut off the beginning of long conversations.
    """
    content = joined(item.output)
    if item.call_id is None:
        return {"role": "user", "content": f"{item.name}: {content}" if item.name else content}
    name = names.get(item.call_id, item.name)
    return {"role": "tool", "tool_call_id": item.call_id, "content": content} | ({"name": name} if name else {})


def _add_to_answer(
    messages: list[dict[str, Any]], item: FunctionCall | Reasoning | OtherItem, names: Mapping[str, str]
) -> None:
    """Add a call, reasoning or a note to the last message if it is the assistant's, else to a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    last = messages[-1]
    if isinstance(item, FunctionCall):
        is_custom = item.type == "custom_tool_call"
        arguments = json.dumps({"input": item.arguments}, ensure_ascii=False) if is_custom else item.arguments
        function = {"name": names[item.call_id], "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, OtherItem):
        last["content"] = _paragraphs(last.get("content"), not_shown(item.type))
    elif text := "".join(part.text for part in item.content or ()):  # summaries and encrypted items have none
        last["reasoning_content"] = last.get("reasoning_content", "") + text


def _add_message(messages: list[dict[str, Any]], item: Message) -> None:
    """Append a message; text of the assistant joins the text, notes and reasoning that come before it."""
    given = {name: value for name, value in item.plain().items() if name not in ("type", "id", "status", "phase")}
    last = messages[-1] if messages else {}
    if given["role"] == last.get("role") == "assistant" and "tool_calls" not in last:
        messages[-1] = {**last, **given, "content": _paragraphs(last.get("content"), given["content"])}
    else:
        messages.append(given)


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))
