"""The request body of POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lp_runtime.chat.chat_format import ToolUse
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import RequestError
from lp_runtime.server.anthropic.blocks import Block, ToolUseBlock, Turn, conversation_of, other_types
from lp_runtime.server.openai.common import check_stops
from lp_runtime.server.openai.parts import (
    MAX_TOOLS,
    NAME_PATTERN,
    Mode,
    NamedPart,
    ResponseFormat,
    choose_tools,
    constraint_of,
    refuse,
)
from lp_runtime.server.openai.protocol import Conversation

CHOICES: dict[str, Mode] = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicTool(NamedPart):
    """A tool that the client runs; tools that Anthropic's servers run have other types."""

    type: str | None = None
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, object] | None = None

    @property
    def is_own(self) -> bool:
        return self.type in (None, "custom")

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        if self.input_schema is None:
            raise RequestError(f"tool {self.name!r}: must have an input_schema")
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        known = {name: value for name, value in (function | {"strict": self.strict}).items() if value is not None}
        return {"type": "function", "function": known}


class ToolChoice(NamedPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(NamedPart):
    """Settings of the answer; `effort` is the template's variable `reasoning_effort`."""

    effort: str | None = None
    format: ResponseFormat | None = None


class Messages(Conversation):
    """The body of POST /v1/messages.

    The fields after `output_format` concern Anthropic's own machines, and have no effect. A last message of the
    assistant is continued if it has no calls. Extensions of the API are those of Conversation.
    """

    caps_length: ClassVar[bool] = True

    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] = ""
    stop_sequences: list[str] | None = None
    tools: list[AnthropicTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    cache_control: dict[str, object] | None = None
    context_management: dict[str, object] | None = None
    compaction: object = None
    container: object = None
    diagnostics: object = None
    fallbacks: object = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def unknown_fields(self) -> list[str]:
        tools = [f"tools[{tool.type}]" for tool in self.tools if not tool.is_own]
        return [*tools, *super().unknown_fields(), *(f"messages[{kind}]" for kind in other_types(self.messages))]

    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def continues_message(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in last.content)

    def stops(self) -> list[str] | None:
        return None if self.stop_sequences is None else check_stops("stop_sequences", self.stop_sequences)

    def constraint(self) -> ConstraintConfig | None:
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        return super().constraint() if form is None else constraint_of(form, self.structured_outputs)

    def conversation(self) -> list[dict[str, object]]:
        has_mcp = bool((self.model_extra or {}).get("mcp_servers"))
        refuse(
            {
                f"n={self.n}: must be 1": self.n != 1,
                "stop: is not a field of messages; give stop_sequences": self.stop is not None,
                "trace: is not supported in messages": self.trace,
                "mcp_servers: is not supported; leave it out or give []": has_mcp,
            }
        )
        return conversation_of(self.system, self.messages)

    def tool_use(self) -> ToolUse:
        asked, tools = self.tool_choice, [tool.plain() for tool in self.tools if tool.is_own]
        if asked.type == "any" and not tools:
            raise RequestError("tool_choice=any: there are no tools")
        if asked.type == "tool":
            return choose_tools(tools, "required", False, [asked.name or ""])
        return choose_tools(tools, CHOICES[asked.type], not asked.disable_parallel_tool_use)
