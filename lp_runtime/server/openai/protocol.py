"""Request bodies of the OpenAI API: completions, chats and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from lp_runtime.chat.chat_format import ToolUse
from lp_runtime.errors import RequestError
from lp_runtime.server.openai.common import MAX_CHOICES, Common
from lp_runtime.server.openai.parts import (
    MAX_TOOLS,
    Int,
    Message,
    NamedPart,
    NamedTool,
    OpenPart,
    StrictPart,
    Tool,
    choose_tools,
    type_of,
)

MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20


class Completion(Common):
    """The body of POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    best_of: Int | None = None
    add_special_tokens: bool = True  # whether the tokenizer adds some to a prompt that is text

    def prompts(self) -> Sequence[str | list[int]]:
        if self.suffix and not isinstance(self.prompt, str):
            raise RequestError("suffix: only with one prompt, as text")
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of={self.best_of}: is not supported; leave it out or give n={self.n}")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt: is empty")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise RequestError(f"prompt: {len(self.prompt)} prompts x n={self.n}: must be at most {MAX_CHOICES}")
        return self.prompt

    def length(self) -> int | None:
        """Return the limit of new tokens.

        With `echo`, a client may ask for 0 new tokens; one is generated nevertheless, and not shown (`shows_new`).
        """
        return self.max_tokens if self.shows_new else 1

    @property
    def shows_new(self) -> bool:
        """Whether the answer shows new tokens, not only the prompt."""
        return not (self.echo and self.max_tokens == 0)


class Thinking(NamedPart):
    """Anthropic's and z.ai's switch of the reasoning part; `budget_tokens` bounds it."""

    type: Literal["enabled", "adaptive", "auto", "between_tools", "disabled"]
    budget_tokens: Int | None = Field(default=None, ge=0)


def _with_type(thinking: object) -> object:
    """Return the object that true or false stand for."""
    return {"type": "enabled" if thinking else "disabled"} if isinstance(thinking, bool) else thinking


class Rendered(StrictPart):
    """Fields that say how the chat template is rendered.

    `reasoning_effort` and `enable_thinking` are variables of the template, as `chat_template_kwargs` are. `thinking`
    is another form of `enable_thinking`.
    """

    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    thinking: Annotated[Thinking | None, BeforeValidator(_with_type)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def effort(self) -> str | None:
        """Return how much the model is to reason; None if not given."""
        return None

    def template_kwargs(self) -> dict[str, Any]:
        effort, thinks = self.effort(), self.enable_thinking
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if thinks is None and self.thinking is not None:
            thinks = self.thinking.type != "disabled"
        if effort == "none" or thinks is not None:
            given["enable_thinking"] = bool(thinks)
        return {**given, **self.chat_template_kwargs}

    @property
    def continues_message(self) -> bool:
        return self.continue_final_message

    def rendering(self) -> dict[str, bool]:
        """Return which parts around the last message are rendered, as arguments of `apply_chat_template`."""
        if not self.continues_message:
            return {"add_generation_prompt": self.add_generation_prompt is not False}
        if self.add_generation_prompt:
            raise RequestError("continue_final_message: not with add_generation_prompt=true")
        return {"add_generation_prompt": False, "continue_final_message": True}


class Tokenize(Rendered):
    """The body of POST /tokenize: a prompt, or a conversation with its tools. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    add_special_tokens: bool = True
    split_special_tokens: bool = False
    return_token_strs: bool = False


class Detokenize(OpenPart):
    model: str | None = None
    tokens: list[int]


class Conversation(Rendered, Common):
    """Fields that conversations share."""

    fills_context: ClassVar[bool] = True

    thinking_token_budget: Int | None = Field(default=None, ge=-1)

    def reasoning_budget(self) -> int | None:
        """Return how many tokens the reasoning part may have; None for no limit, which -1 is, too."""
        if self.thinking_token_budget in (None, -1):
            return None if self.thinking is None else self.thinking.budget_tokens
        return self.thinking_token_budget


class AllowedTools(NamedPart):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(NamedPart):
    """A tool_choice that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_tag(choice: Any) -> str:
    """Return which form of a tool_choice is meant; in brackets: see parts.py."""
    if isinstance(choice, str):
        return "[mode]"
    return "[allowed]" if type_of(choice) == "allowed_tools" else "[named]"


ChatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required", "any"], Tag("[mode]")]
    | Annotated[NamedTool, Tag("[named]")]
    | Annotated[AllowedToolsChoice, Tag("[allowed]")],
    Discriminator(choice_tag),
]


class Chat(Conversation):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Int | None = None
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ChatToolChoice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Int | None = Field(default=None, ge=0, le=MAX_CHAT_LOGPROBS)
    reasoning_effort: str | None = None

    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def num_top_logprobs(self) -> int | None:
        """Return the number of likeliest tokens per log-probability; None without log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs={self.top_logprobs}: only with logprobs=true")
        return self.top_logprobs or 0 if self.logprobs else None

    def tool_use(self) -> ToolUse:
        tools, choice = [tool.plain() for tool in self.tools], self.tool_choice
        if isinstance(choice, NamedTool):
            return choose_tools(tools, "required", False, [choice.function.name])
        if isinstance(choice, AllowedToolsChoice):
            allowed = choice.allowed_tools
            names = [tool.function.name for tool in allowed.tools]
            return choose_tools(tools, allowed.mode, self.parallel_tool_calls, names)
        return choose_tools(tools, "required" if choice == "any" else choice, self.parallel_tool_calls)

    def conversation(self) -> list[dict[str, object]]:
        return [message.plain() for message in self.messages]
