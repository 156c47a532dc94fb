"""Parts of request bodies that the APIs share: messages, tools, and constraints of the answer.

Tags of unions are in brackets, by which http/errors.py keeps them out of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lp_runtime.chat.chat_format import ToolUse
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import ConstraintError, RequestError

MAX_TOOLS = 1024  # OpenAI's API takes 128; clients of Anthropic's API send all tools of all their MCP servers
NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,128}$"
ANY_OBJECT = {"type": "object"}
TextType = Literal["text", "input_text", "output_text", "refusal"]
TEXT_TYPES = get_args(TextType)


def _whole(value: object) -> object:
    """Return a number without a fraction as an integer: some clients write 5 as 5.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # larger ones may be rounded
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_whole)]


class StrictPart(BaseModel):
    """Base of bodies, and of parts without unknown fields. Null fields count as not given, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class NamedPart(StrictPart):
    """Base of parts whose unknown fields have no effect, and are named in the log or refused (`unknown_in`)."""

    model_config = ConfigDict(extra="allow", strict=True)


class OpenPart(BaseModel):
    """Base of parts whose unknown fields are ignored, because clients send back parts of earlier answers."""

    model_config = ConfigDict(extra="ignore", strict=True)


def unknown_in(body: BaseModel, place: str = "") -> Iterator[str]:
    """Yield the names of unknown fields inside a body's parts, without the places in lists."""
    for name in type(body).model_fields:
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, NamedPart):
                yield from (f"{place}{name}.{field}" for field in part.model_extra or ())
            if isinstance(part, BaseModel):
                yield from unknown_in(part, f"{place}{name}.")


def type_of(part: Any) -> Any:
    """Return the field `type` of a part, which is JSON or read already; None without one."""
    return part.get("type") if isinstance(part, dict) else getattr(part, "type", None)


class ContentPart(NamedPart):
    """A part of a message's content; only text is supported, which a refusal is, too."""

    type: TextType
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    cache_control: dict[str, object] | None = None
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


def not_shown(kind: str) -> str:
    """Return the note that the model sees in place of a part that is no text."""
    return f"[{kind}: not shown]"


def with_notes(content: object) -> object:
    """Return a message's content with notes in place of parts that are no text; their type is an unknown field then.

    For content that a client wrote by itself, as results of tools: it sends that again with each turn, so that a
    refusal would end the conversation.
    """
    return [_with_note(part) for part in content] if isinstance(content, list) else content


def _with_note(part: object) -> object:
    kind = type_of(part)
    if not isinstance(kind, str) or kind in TEXT_TYPES:
        return part
    return {"type": "text", "text": not_shown(kind), kind: True}


class Message(BaseModel):
    """A message of a conversation; unknown fields are passed to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None  # of an answer without content

    @model_validator(mode="before")
    @classmethod
    def _with_notes(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("role") in ("assistant", "tool"):
            return data | {"content": with_notes(data.get("content"))}
        return data

    def plain(self) -> dict[str, Any]:
        """Convert the message to the dict that chat templates expect, with its content as one string."""
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {**more, "role": self.role, "content": joined(self.content or self.refusal or "")}


def joined(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(NamedPart):
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def shown(self, name: str | None = None) -> dict[str, Any]:
        """Return the function as chat templates expect it, by default under its own name."""
        known = self.model_dump(exclude_none=True, include=set(Function.model_fields))
        return {"type": "function", "function": known if name is None else known | {"name": name}}


class Tool(NamedPart):
    """A tool of /v1/chat/completions."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: dict[str, object] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        return self.function.shown()


class NamedFunction(NamedPart):
    name: str


class NamedTool(NamedPart):
    """A tool_choice that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


Mode = Literal["none", "auto", "required"]


def choose_tools(
    tools: Sequence[Mapping[str, Any]], mode: Mode, is_parallel: bool, names: Sequence[str] | None = None
) -> ToolUse:
    """Return which tools an answer may or must call; with `names` only those."""
    if mode == "none":
        return ToolUse((), False, is_parallel)
    if names is not None:
        named = {tool["function"]["name"]: tool for tool in tools}
        for name in names:
            if name not in named:
                raise RequestError(f"tool_choice: {name!r} is not the name of any of the tools")
        tools = [tool for name, tool in named.items() if name in names]
    if mode == "required" and not tools:
        raise RequestError("tool_choice=required: there are no tools")
    return ToolUse(tools, mode == "required", is_parallel)


def refuse(refused: dict[str, bool]) -> None:
    """Raise a RequestError with the first message whose condition holds."""
    for message, is_refused in refused.items():
        if is_refused:
            raise RequestError(message)


class NamedSchema(StrictPart):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictPart):
    """OpenAI's response_format, or text.format of /v1/responses, with the schema's fields next to `type`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def constraint(self) -> ConstraintConfig:
        """Return the constraint; its `kind` is None for plain text."""
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if self.type == "text":
            if schema is not None:
                raise ConstraintError("response_format: a schema has no effect with type=text; give type=json_schema")
            return ConstraintConfig()
        if self.type == "json_object" and schema in (None, {}):
            schema = ANY_OBJECT
        if schema is None:
            raise ConstraintError("response_format.json_schema.schema: is missing")
        return ConstraintConfig(json_schema=schema)


class StructuredOutputs(StrictPart):
    """vLLM's structured_outputs."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = False

    def constraint(self) -> ConstraintConfig:
        """Return the constraint; its `kind` is None if none is given."""
        if self.json_object and self.json_ is not None:
            raise ConstraintError("structured_outputs: json and json_object are given; give one of them")
        if self.disable_additional_properties:
            raise ConstraintError(
                "structured_outputs.disable_additional_properties=true: is not supported; give additionalProperties in"
                " the schema"
            )
        return ConstraintConfig(
            json_schema=ANY_OBJECT if self.json_object else self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
            whitespace="fixed" if self.disable_any_whitespace else "any",
        )


def constraint_of(formatted: ResponseFormat | None, outputs: StructuredOutputs | None) -> ConstraintConfig | None:
    """Return the constraint that a body asks for, in at most one of both forms; None without one."""
    asked = [each.constraint() for each in (formatted, outputs) if each is not None]
    given = [each for each in asked if each.kind is not None]
    if len(given) > 1:
        raise ConstraintError("response_format and structured_outputs: give one of them")
    return given[0] if given else None
