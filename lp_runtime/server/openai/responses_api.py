"""The request body of POST /v1/responses and of its token count: a chat without stored state."""

from __future__ import annotations

from pydantic import Field

from lp_runtime.chat.chat_format import ToolUse
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.server.openai.input_items import InputItem, messages_of, other_types
from lp_runtime.server.openai.parts import (
    MAX_TOOLS,
    Int,
    NamedPart,
    OpenPart,
    ResponseFormat,
    choose_tools,
    constraint_of,
    refuse,
)
from lp_runtime.server.openai.protocol import Conversation
from lp_runtime.server.openai.responses_tools import (
    NamedFunctionTool,
    ResponsesTool,
    ResponsesToolChoice,
    functions_of,
    hosted_types,
    shown_names,
)

VERBOSITIES = (None, "medium")
TRUNCATIONS = (None, "auto", "disabled")  # "auto" shortens what is too long; here that is refused in any case
# Values of `include` without effect: reasoning is always sent, in plain text, and no tools of OpenAI's servers run.
NO_EFFECT = {
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
}


class TextSettings(NamedPart):
    format: ResponseFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(OpenPart):
    effort: str | None = None


class Responses(Conversation):
    """The body of POST /v1/responses."""

    input: str | list[InputItem]
    tools: list[ResponsesTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    instructions: str | None = None
    max_output_tokens: Int | None = None
    top_logprobs: Int | None = Field(default=None, ge=0, le=0)
    previous_response_id: str | None = None
    conversation_: object = Field(default=None, alias="conversation")
    prompt: object = None
    background: bool = False
    text: TextSettings | None = None
    include: list[str] | None = None
    truncation: str | None = None
    reasoning: ReasoningSettings | None = None

    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def unknown_fields(self) -> list[str]:
        unseen = [f"tools[{kind}]" for kind in hosted_types(self.tools)]
        if not isinstance(self.input, str):
            unseen += [f"input[{kind}]" for kind in other_types(self.input)]
        has_verbosity = self.text is not None and self.text.verbosity not in VERBOSITIES
        return [*super().unknown_fields(), *unseen, *(["text.verbosity"] if has_verbosity else [])]

    def constraint(self) -> ConstraintConfig | None:
        if self.text is None or self.text.format is None:
            return super().constraint()
        return constraint_of(self.text.format, self.structured_outputs)

    def conversation(self) -> list[dict[str, object]]:
        stored = "is not supported, responses are not stored; send the whole conversation"
        refuse(
            {
                f"previous_response_id: {stored}": self.previous_response_id is not None,
                f"conversation: {stored}": self.conversation_ is not None,
                "prompt: is not supported; send its text as instructions and input": self.prompt is not None,
                "background=true: is not supported": self.background,
                f"include={self.include}: is not supported; leave it out": not NO_EFFECT.issuperset(self.include or ()),
                f"truncation={self.truncation!r}: must be auto or disabled": self.truncation not in TRUNCATIONS,
                f"n={self.n}: must be 1": self.n != 1,
                "max_tokens: is not a field of responses; give max_output_tokens": self.max_tokens is not None,
                "input: is empty": not self.input,
            }
        )
        messages: list[dict[str, object]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return messages + messages_of(self.input, shown_names(self.tools))

    def tool_use(self) -> ToolUse:
        shown, choice = shown_names(self.tools), self.tool_choice
        tools = [function.shown(shown[path]) for path, function in functions_of(self.tools)]
        if isinstance(choice, str):
            return choose_tools(tools, choice, self.parallel_tool_calls)
        if isinstance(choice, NamedFunctionTool):
            name = shown.get((choice.namespace, choice.name), choice.name)
            return choose_tools(tools, "required", False, [name])
        allowed = [tool for tool in choice.tools if tool.type == "function"]
        names = [shown.get((tool.namespace, tool.name), tool.name) for tool in allowed]
        return choose_tools(tools, choice.mode, self.parallel_tool_calls, names)

    @property
    def length_field(self) -> str:
        return "max_output_tokens"
