"""Tools of a chat: what clients say of them, the format in which a model calls them, and the constraint of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import RequestError
from lp_runtime.server.chat_parser import END_OF_THINK, THINK, ChatParser, HarmonyParser, TextParser

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


class NamedFunction(_Part):
    """A tool by its name."""

    name: str


class NamedTool(_Part):
    """A tool_choice that names a tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CallFormat(NamedTuple):
    """How a family of models writes a call.

    Attributes:
        begin: what comes before all calls.
        head: what comes before a call's arguments; NAME stands for the tool's name.
        tail: what comes behind them.
        separator: what comes between two calls.
        end: what comes behind all calls.
    """

    begin: str
    head: str
    tail: str
    separator: str
    end: str


FORMATS = {
    "hermes": CallFormat("", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", ""),
    "llama3": CallFormat("", '{"name": "NAME", "parameters": ', "}", "; ", ""),
    "mistral": CallFormat("[TOOL_CALLS][", '{"name": "NAME", "arguments": ', "}", ", ", "]"),
    "mistral_args": CallFormat("", "[TOOL_CALLS]NAME[ARGS]", "", "", ""),
    "harmony": CallFormat("", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", "", ""),
}


class ChatFormat:
    """The form of a model's answers in a chat.

    Args:
        template: text of the model's chat template; empty without one.
        tool_format: one of config.serving.TOOL_FORMATS.
        reasoning: one of config.serving.REASONINGS.

    Attributes:
        tool_format: one of FORMATS; None where calls are not looked for.
        has_reasoning: whether an answer may begin with a reasoning part.
        takes_tools: whether the template shows tools to the model.
    """

    def __init__(self, template: str, tool_format: str = "auto", reasoning: str = "auto"):
        self.takes_tools = "tools" in template
        name = guess_format(template) if tool_format == "auto" else tool_format
        if name == "mistral" and "[ARGS]" in template:
            name = "mistral_args"
        self.tool_format = None if name == "none" else name
        self.has_reasoning = reasoning == "think" or (reasoning == "auto" and END_OF_THINK in template)

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages on channels."""
        return self.tool_format == "harmony"

    def parser(self, has_tools: bool, prompt_end: str) -> ChatParser | None:
        """Return what takes an answer apart; None where an answer is its text.

        Args:
            has_tools: whether calls are looked for.
            prompt_end: the last characters of the prompt.
        """
        if self.is_harmony:
            return HarmonyParser()
        if not has_tools and not self.has_reasoning:
            return None
        is_thinking = self.is_thinking(prompt_end)
        if not has_tools or self.tool_format is None:
            return TextParser(self.has_reasoning, is_thinking)
        if self.tool_format == "hermes":
            return TextParser(self.has_reasoning, is_thinking, ("<tool_call>",), "</tool_call>")
        if self.tool_format == "llama3":
            return TextParser(self.has_reasoning, is_thinking, ("<|python_tag|>",), bare=True)
        return TextParser(self.has_reasoning, is_thinking, ("[TOOL_CALLS]",))

    def is_thinking(self, prompt_end: str) -> bool:
        """Whether a prompt has opened the reasoning part of the answer."""
        return self.has_reasoning and prompt_end.rstrip().endswith(THINK)

    def shows_special_tokens(self, has_tools: bool) -> bool:
        """Whether the parser must see special tokens."""
        return self.is_harmony or (has_tools and self.tool_format is not None)

    def constraint_of_calls(
        self, tools: Sequence[Tool], is_parallel: bool, prompt_end: str, may_think: bool = True
    ) -> ConstraintConfig:
        """Return the constraint of an answer that calls at least one of some tools.

        Args:
            tools: the tools that may be called.
            is_parallel: whether there may be several calls.
            prompt_end: the last characters of the prompt.
            may_think: whether a reasoning part may come first.

        Raises:
            RequestError: the model's format of calls is not known.
        """
        if self.tool_format is None:
            raise RequestError(
                "tool_choice: no format of calls is known for the model's chat template; serve with tool_format"
            )
        form = FORMATS[self.tool_format]
        calls: dict[str, object] = {
            "type": "tags_with_separator",
            "tags": [_call(form, tool.function) for tool in tools],
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not is_parallel or self.is_harmony,
        }
        parts = [_text(form.begin), calls, _text(form.end)]
        if self.is_harmony and may_think:
            analysis = _free("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
            parts.insert(0, {"type": "optional", "content": analysis})
        elif self.is_thinking(prompt_end):
            parts.insert(0, _sequence(_free("", END_OF_THINK), _text("\n\n")))
        elif self.has_reasoning and may_think:
            thought = _sequence(_free(THINK, END_OF_THINK), _text("\n\n"))
            parts.insert(0, {"type": "optional", "content": thought})
        return ConstraintConfig(structural_tag={"type": "structural_tag", "format": _sequence(*parts)})

    def behind_reasoning(self, constraint: ConstraintConfig, prompt_end: str) -> ConstraintConfig:
        """Return a constraint of the answer's text alone, which begins behind the reasoning part."""
        if self.is_harmony:
            return _on_final_channel(constraint)
        if not self.has_reasoning:
            return constraint
        begin = None if self.is_thinking(prompt_end) else THINK
        return replace(constraint, reasoning_begin=begin, reasoning_end=END_OF_THINK)


def guess_format(template: str) -> str:
    """Return one of config.serving.TOOL_FORMATS, by what a chat template has."""
    for mark, name in (
        ("<|channel|>", "harmony"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>", "hermes"),
        ("<|python_tag|>", "llama3"),
        ('"parameters":', "llama3"),
    ):
        if mark in template:
            return name
    return "none"


def _call(form: CallFormat, function: Function) -> dict[str, object]:
    schema = function.parameters or {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": form.head.replace("NAME", function.name), "content": content, "end": form.tail}


def _text(text: str) -> dict[str, object] | None:
    return {"type": "const_string", "value": text} if text else None


def _free(begin: str, end: str) -> dict[str, object]:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


def _sequence(*parts: Mapping[str, object] | None) -> dict[str, object]:
    return {"type": "sequence", "elements": [part for part in parts if part is not None]}


def _on_final_channel(constraint: ConstraintConfig) -> ConstraintConfig:
    """Return a constraint of the message on harmony's final channel, behind a message of analysis or none."""
    kind, source = constraint.kind, constraint.source
    content: dict[str, object]
    if kind == "json_schema":
        content = {"type": "json_schema", "json_schema": json.loads(source)}
    elif kind == "structural_tag":
        content = json.loads(source)["format"]
    elif kind == "choice":
        content = {"type": "or", "elements": [_text(each) for each in json.loads(source)]}
    else:
        content = {"type": kind, "pattern" if kind == "regex" else "grammar": source}
    analysis = {"type": "optional", "content": _free("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")}
    final = {"type": "tag", "begin": "<|channel|>final<|message|>", "content": content, "end": ""}
    tag = {"type": "structural_tag", "format": _sequence(analysis, final)}
    return ConstraintConfig(structural_tag=tag, whitespace=constraint.whitespace)
