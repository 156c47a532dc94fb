"""Tools of /v1/responses: functions, alone or in namespaces, and those that only OpenAI's servers can run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from lp_runtime.server.openai.parts import MAX_TOOLS, NAME_PATTERN, Function, Mode, NamedFunction, NamedPart, type_of
from lp_runtime.server.openai.protocol import choice_tag

FunctionPath = tuple[str | None, str]  # a function's namespace, None without one, and its name in that


class _Typed(NamedPart):
    """The field `type`, in a separate base class so that pydantic checks it first."""

    type: Literal["function"]


class FunctionTool(Function, _Typed):
    """A function, with its fields next to `type`."""


class HostedTool(BaseModel):
    """A tool that OpenAI's servers run, or that is no function; not shown to the model."""

    type: str


def _tag(tool: Any) -> str:
    kind = type_of(tool)
    if not isinstance(kind, str) or kind == "function":
        return "[function]"
    return "[namespace]" if kind == "namespace" else "[hosted]"


class NamespaceTool(NamedPart):
    """Functions that belong together: Codex sends those of an MCP server so. It finds a call by namespace and name."""

    type: Literal["namespace"]
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    tools: list[ResponsesTool] = Field(max_length=MAX_TOOLS)


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[HostedTool, Tag("[hosted]")],
    Discriminator(_tag),
]


class NamedFunctionTool(NamedFunction, _Typed):
    """A tool_choice that names a function."""

    namespace: str | None = None


class AllowedTool(NamedPart):
    """A tool that an AllowedToolsChoice names; only functions have an effect, as in `tools`."""

    type: str
    name: str = ""
    namespace: str | None = None


class AllowedToolsChoice(NamedPart):
    """A tool_choice that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


ResponsesToolChoice = Annotated[
    Annotated[Mode, Tag("[mode]")]
    | Annotated[NamedFunctionTool, Tag("[named]")]
    | Annotated[AllowedToolsChoice, Tag("[allowed]")],
    Discriminator(choice_tag),
]


AnyTool = FunctionTool | NamespaceTool | HostedTool


def functions_of(tools: Sequence[AnyTool], namespace: str | None = None) -> Iterator[tuple[FunctionPath, FunctionTool]]:
    """Yield all functions with their paths."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield (namespace, tool.name), tool
        elif isinstance(tool, NamespaceTool):
            yield from functions_of(tool.tools, tool.name)


def hosted_types(tools: Sequence[AnyTool]) -> Iterator[str]:
    """Yield the types of tools that the model does not see."""
    for tool in tools:
        if isinstance(tool, HostedTool):
            yield tool.type
        elif isinstance(tool, NamespaceTool):
            yield from hosted_types(tool.tools)


def shown_names(tools: Sequence[AnyTool]) -> dict[FunctionPath, str]:
    """Return the name under which the model sees each function, by its path; no two are equal.

    Functions of a namespace have it in front if others have the same name, and a number after if that name exists, too.
    """
    paths = list(dict.fromkeys(path for path, _ in functions_of(tools)))
    counts = Counter(name for _, name in paths)
    shown = {(namespace, name): name for namespace, name in paths if namespace is None or counts[name] == 1}
    used = set(shown.values())
    for namespace, name in paths:
        if namespace is not None and (namespace, name) not in shown:
            prefixed = f"{namespace.rstrip('_')}__{name}"
            numbered = (f"{prefixed}_{number}" for number in itertools.count(2))
            free = next(each for each in itertools.chain([prefixed], numbered) if each not in used)
            shown[namespace, name] = free
            used.add(free)
    return shown
