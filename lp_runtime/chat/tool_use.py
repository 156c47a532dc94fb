"""Tools of a chat, in the OpenAI API's format, and which of them an answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may or must call.

    Attributes:
        tools: the tools that the model may call; empty if the answer is not searched for calls.
        is_parallel: whether an answer may have several calls.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    is_parallel: bool = True

    @property
    def max_calls(self) -> int | None:
        """Number of calls that an answer shows at most; None for no limit."""
        return None if self.is_parallel else 1


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each tool's arguments, by its name; what is no tool of a function is left out."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {
        function["name"]: function.get("parameters") or {"type": "object"}
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
