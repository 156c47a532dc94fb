"""The request body of POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import RequestError
from lp_runtime.server.anthropic.blocks import Block, Part, Turn, conversation_of
from lp_runtime.server.chat.tools import MAX_TOOLS, NAME_PATTERN, Function, NamedFunction, Tool, ToolUse, choose_tools
from lp_runtime.server.openai.protocol import Common, check_stops
from lp_runtime.server.openai.structure import ResponseFormat, constraint_of

CHOICES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicTool(Part):
    """A tool that the client runs; tools that Anthropic's servers run have other types and are refused."""

    type: str | None = None
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Convert the tool to the form of /v1/chat/completions."""
        if self.type not in (None, "custom") or self.input_schema is None:
            raise RequestError(f"tool {self.name!r}: only tools of type custom, with an input_schema, are supported")
        parameters, strict = self.input_schema, self.strict
        return Tool(
            function=Function(name=self.name, description=self.description, parameters=parameters, strict=strict)
        )


class ToolChoice(Part):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Part):
    """Settings of the answer; `effort` has no effect."""

    effort: str | None = None
    format: ResponseFormat | None = None


class Messages(Common):
    """The body of POST /v1/messages.

    `thinking` has no effect: a model that reasons does so with or without it. The fields after it concern Anthropic's
    own machines. Extensions of the API are those of Common.
    """

    caps_length: ClassVar[bool] = True

    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] = ""
    stop_sequences: list[str] | None = None
    tools: list[AnthropicTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputConfig | None = None
    thinking: dict[str, object] | None = None
    cache_control: dict[str, object] | None = None
    inference_geo: str | None = None
    speed: str | None = None

    def check(self) -> None:
        """Raise RequestError if a field asks for something that is not supported."""
        refused = {
            f"n={self.n}: must be 1": self.n != 1,
            "stop: is not a field of messages; give stop_sequences": self.stop is not None,
            "trace: is not supported in messages": self.trace,
            "mcp_servers: is not supported; leave it out or give []": bool((self.model_extra or {}).get("mcp_servers")),
            "messages: the last one is the assistant's: continuing an answer is not supported": (
                self.messages[-1].role == "assistant"
            ),
        }
        for message, is_refused in refused.items():
            if is_refused:
                raise RequestError(message)

    def stops(self) -> list[str] | None:
        """Return the stop strings; None if none are given."""
        return None if self.stop_sequences is None else check_stops("stop_sequences", self.stop_sequences)

    def constraint(self) -> ConstraintConfig | None:
        """Return the constraint of the answer's text; None for any text."""
        if self.output_config is None or self.output_config.format is None:
            return super().constraint()
        return constraint_of(self.output_config.format, self.structured_outputs)

    def conversation(self) -> list[dict[str, object]]:
        """Return the conversation as the messages that chat templates expect."""
        self.check()
        return conversation_of(self.system, self.messages)

    def tool_use(self) -> ToolUse:
        """Return which tools the answer may or must call."""
        choice, tools = self.tool_choice, [tool.tool() for tool in self.tools]
        if choice.type == "any" and not tools:
            raise RequestError("tool_choice=any: there are no tools")
        is_parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            return choose_tools(tools, NamedFunction(name=choice.name or ""), is_parallel)
        return choose_tools(tools, CHOICES[choice.type], is_parallel)

    def length(self) -> int | None:
        """Return how many tokens to generate at most; None for the default."""
        return self.max_tokens
