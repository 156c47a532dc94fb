"""Input items of /v1/responses, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from lp_runtime.errors import RequestError
from lp_runtime.server.openai.parts import ContentPart, Message, OpenPart, joined
from lp_runtime.server.openai.responses_tools import FunctionPath


class FunctionCall(OpenPart):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionCallOutput(OpenPart):
    """The result of a call; without `call_id`, which Codex sends, something the client did by itself."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    name: str | None = None
    output: str | list[ContentPart]


class ReasoningText(OpenPart):
    text: str


class Reasoning(OpenPart):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class OtherItem(OpenPart):
    type: str


def _tag(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    known = ("message", "function_call", "function_call_output", "reasoning")
    return f"[{kind}]" if kind in known else "[other]"  # in brackets: see parts.py


InputItem = Annotated[
    Annotated[Message, Tag("[message]")]
    | Annotated[FunctionCall, Tag("[function_call]")]
    | Annotated[FunctionCallOutput, Tag("[function_call_output]")]
    | Annotated[Reasoning, Tag("[reasoning]")]
    | Annotated[OtherItem, Tag("[other]")],
    Discriminator(_tag),
]


def messages_of(
    items: Sequence[Message | FunctionCall | FunctionCallOutput | Reasoning | OtherItem],
    shown: Mapping[FunctionPath, str],
) -> list[Message]:
    """Convert input items to the messages of a conversation.

    Text and calls of one answer become one message of the assistant. Its reasoning becomes that message's
    `reasoning_content`, which templates may show or leave out. `shown` has the names that the model sees of functions.
    """
    answers: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        if isinstance(item, OtherItem):
            raise RequestError(f"input: items of type {item.type!r} are not supported")
        if isinstance(item, FunctionCallOutput):
            answers.append(_result_of(item, names))
        elif isinstance(item, Message):
            _add_message(answers, item)
        else:
            if isinstance(item, FunctionCall):
                names[item.call_id] = shown.get((item.namespace, item.name), item.name)
            _add_to_answer(answers, item, names)
    messages = [Message(**each) for each in answers if each.keys() > {"role"}]
    if not messages:
        raise RequestError("input: is empty")
    return messages


def _result_of(item: FunctionCallOutput, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the message of a call's result; `names` has the tool's name by the call's id."""
    content = joined(item.output)
    if item.call_id is None:
        return {"role": "user", "content": f"{item.name}: {content}" if item.name else content}
    if item.call_id not in names:
        raise RequestError(f"input: function_call_output of call_id={item.call_id!r}: there is no such call")
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": content}


def _add_to_answer(messages: list[dict[str, Any]], item: FunctionCall | Reasoning, names: dict[str, str]) -> None:
    """Add a call or reasoning to the last message if it is the assistant's, else to a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    last = messages[-1]
    if isinstance(item, FunctionCall):
        function = {"name": names[item.call_id], "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif text := "".join(part.text for part in item.content or ()):  # summaries and encrypted items have none
        last["reasoning_content"] = last.get("reasoning_content", "") + text


def _add_message(messages: list[dict[str, Any]], item: Message) -> None:
    """Append a message; the assistant's text after a reasoning item joins that item's message."""
    given = item.model_dump(exclude={"type", "id", "status", "phase"})
    if messages and messages[-1].keys() <= {"role", "reasoning_content"} and given["role"] == "assistant":
        messages[-1].update(given)
    else:
        messages.append(given)
