"""Tools of a chat: what clients say of them, and which of them an answer may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lp_runtime.errors import RequestError

MAX_TOOLS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,64}$"


class _Part(BaseModel):
    """A part of a body, without conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_Part):
    """A tool that is a function."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: dict[str, object] | None = None


class _Typed(_Part):
    """What stands beside its type, which is checked first."""

    type: Literal["function"]


class FunctionTool(Function, _Typed):
    """A tool of /v1/responses, where the function stands beside the type."""

    def tool(self) -> Tool:
        """Return the tool in the form of chats."""
        return Tool(function=Function(**self.model_dump(exclude={"type"})))


class NamedFunction(_Part):
    """A tool by its name."""

    name: str


class NamedTool(_Part):
    """A tool_choice that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class NamedFunctionTool(NamedFunction, _Typed):
    """A tool_choice of /v1/responses that names a tool."""


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may or must call.

    Attributes:
        tools: the tools that the model may call; empty where calls are not looked for.
        must_call: whether the answer must be a call.
        is_parallel: whether there may be several calls.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    is_parallel: bool = True

    @property
    def max_calls(self) -> int | None:
        """Calls that an answer shows at most; None for no limit."""
        return None if self.is_parallel else 1

    def shown(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in self.tools]


def choose_tools(
    tools: Sequence[Tool], choice: Literal["none", "auto", "required"] | NamedFunction, is_parallel: bool
) -> ToolUse:
    """Return which tools an answer may or must call.

    Args:
        tools: the tools that the client offers.
        choice: tool_choice; a name stands for a call of that tool alone.
        is_parallel: whether the client takes several calls.

    Raises:
        RequestError: a call is asked for and there is no such tool.
    """
    if choice == "none":
        return ToolUse((), False, is_parallel)
    if isinstance(choice, NamedFunction):
        named = [tool for tool in tools if tool.function.name == choice.name]
        if not named:
            raise RequestError(f"tool_choice: {choice.name!r} is not the name of any of the tools")
        return ToolUse(named, True, False)
    if choice == "required" and not tools:
        raise RequestError("tool_choice=required: there are no tools")
    return ToolUse(tools, choice == "required", is_parallel)
