"""Definitions of tools that clients send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from lp_runtime.chat.tool_use import ToolUse
from lp_runtime.errors import RequestError

MAX_TOOLS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,128}$"


class _Part(BaseModel):
    """Base of body parts: no unknown fields, no type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_Part):
    """The definition of a function that the model may call."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    """A tool of /v1/chat/completions."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: dict[str, object] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool as the dict that chat templates expect."""
        return self.model_dump(exclude_none=True, exclude={"cache_control"})


class _Typed(_Part):
    """The field `type`, in a separate base class so that pydantic checks it first."""

    type: Literal["function"]


class FunctionTool(Function, _Typed):
    """A tool of /v1/responses, with the function's fields next to `type`."""

    def tool(self) -> Tool:
        """Convert the tool to the form of /v1/chat/completions."""
        return Tool(function=Function(**self.model_dump(exclude={"type"})))


class HostedTool(BaseModel):
    """A tool of /v1/responses that OpenAI's servers run, or one that is not a function; the model is not shown it."""

    type: str


def _tag(tool: Any) -> str:
    """Return a tool's union tag; because of its brackets, server/errors.py keeps it out of messages."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "[hosted]" if isinstance(kind, str) and kind != "function" else "[function]"


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[HostedTool, Tag("[hosted]")], Discriminator(_tag)
]


class NamedFunction(_Part):
    """A reference to a tool by its name."""

    name: str


class NamedTool(_Part):
    """A tool_choice that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class NamedFunctionTool(NamedFunction, _Typed):
    """A tool_choice of /v1/responses that names a tool."""


def choose_tools(
    tools: Sequence[Tool], choice: Literal["none", "auto", "required"] | NamedFunction, is_parallel: bool
) -> ToolUse:
    """Return which tools an answer may or must call; a named `choice` requires one call of that tool."""
    if choice == "none":
        return ToolUse((), False, is_parallel)
    if isinstance(choice, NamedFunction):
        named = [tool.plain() for tool in tools if tool.function.name == choice.name]
        if not named:
            raise RequestError(f"tool_choice: {choice.name!r} is not the name of any of the tools")
        return ToolUse(named, True, False)
    if choice == "required" and not tools:
        raise RequestError("tool_choice=required: there are no tools")
    return ToolUse([tool.plain() for tool in tools], choice == "required", is_parallel)
