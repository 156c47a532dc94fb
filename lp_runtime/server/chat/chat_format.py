"""The chat syntax of a model family: its parser, and constraints for reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import RequestError
from lp_runtime.server.chat.chat_parser import END_OF_THINK, THINK, ChatParser, HarmonyParser, TextParser
from lp_runtime.server.chat.tools import Function, ToolUse


class CallFormat(NamedTuple):
    """The syntax of tool calls in a model family.

    Attributes:
        begin: text before all calls.
        head: text before a call's arguments; NAME stands for the tool's name.
        tail: text after a call's arguments.
        separator: text between two calls.
        end: text after all calls.
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
    """The syntax of one model's chat answers.

    Args:
        template: text of the model's chat template; empty without one.
        tool_format, reasoning: one of TOOL_FORMATS and one of REASONINGS of config.serving.

    Attributes:
        tool_format: one of FORMATS; None if answers are not searched for calls.
        has_reasoning: whether an answer may begin with a reasoning part.
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
        """Whether answers are messages on channels, as in OpenAI's harmony format."""
        return self.tool_format == "harmony"

    def parser(self, has_tools: bool, prompt_end: str, is_either: bool = False) -> ChatParser | None:
        """Create the parser of an answer; None if answers are plain text.

        `is_either`: whether the answer is either only calls or only text; true if the text is constrained.
        """
        if self.is_harmony:
            return HarmonyParser()
        if not has_tools and not self.has_reasoning:
            return None
        is_thinking = self.is_thinking(prompt_end)
        if not has_tools or self.tool_format is None:
            return TextParser(self.has_reasoning, is_thinking)
        if self.tool_format == "hermes":
            return TextParser(self.has_reasoning, is_thinking, ("<tool_call>",), "</tool_call>", is_either=is_either)
        if self.tool_format == "llama3":
            return TextParser(self.has_reasoning, is_thinking, ("<|python_tag|>",), bare=True, is_either=is_either)
        return TextParser(self.has_reasoning, is_thinking, ("[TOOL_CALLS]",), is_either=is_either)

    def is_thinking(self, prompt_end: str) -> bool:
        """Whether the prompt has already opened the answer's reasoning part."""
        return self.has_reasoning and prompt_end.rstrip().endswith(THINK)

    def reasoning_marks(self, prompt_end: str) -> tuple[str | None, str] | None:
        """Return the texts (begin, end) around an answer's reasoning part; None without reasoning.

        `begin` is None if the prompt has opened the part, and empty if every answer begins with it.
        """
        if self.is_harmony:
            return "", FINAL
        if not self.has_reasoning:
            return None
        return None if self.is_thinking(prompt_end) else THINK, END_OF_THINK

    def shows_special_tokens(self, has_tools: bool) -> bool:
        """Whether the parser must see special tokens."""
        return self.is_harmony or (has_tools and self.tool_format is not None)

    def constraint(
        self, use: ToolUse, text: ConstraintConfig | None, prompt_end: str, may_think: bool = True
    ) -> ConstraintConfig | None:
        """Return the constraint of an answer; None if it may be anything.

        An answer that must be a call consists of calls only. One that may be a call consists of calls only, or of text
        that satisfies the constraint `text`. `may_think`: whether a reasoning part may come first if the prompt has not
        opened one.
        """
        if use.must_call:
            if self.tool_format is None:
                raise RequestError(
                    "tool_choice: the format of tool calls is not known for this model; serve with tool_format=..."
                )
            answer, whitespace = self._calls(use), "fixed"
        elif text is None:
            return None
        elif use.tools and self.tool_format is not None:
            content = _content(text)
            if self.is_harmony:
                content = _final(content)
            answer, whitespace = {"type": "or", "elements": [self._calls(use), content]}, text.whitespace
        else:
            return self.behind_reasoning(text, prompt_end)
        tag = {"type": "structural_tag", "format": _sequence(*self._reasoning(prompt_end, may_think), answer)}
        return ConstraintConfig(structural_tag=tag, whitespace=whitespace)

    def _calls(self, use: ToolUse) -> dict[str, object]:
        """Return the structural-tag format of at least one call."""
        assert self.tool_format is not None
        form = FORMATS[self.tool_format]
        calls: dict[str, object] = {
            "type": "tags_with_separator",
            "tags": [_call(form, tool.function) for tool in use.tools],
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not use.is_parallel or self.is_harmony,
        }
        return _sequence(_text(form.begin), calls, _text(form.end))

    def _reasoning(self, prompt_end: str, may_think: bool) -> list[dict[str, object]]:
        """Return the format of the reasoning before calls or text: a list of one element, or none."""
        if self.is_harmony:
            return [ANALYSIS] if may_think else []
        if self.is_thinking(prompt_end):
            return [_sequence(_free("", END_OF_THINK), _text("\n\n"))]
        if self.has_reasoning and may_think:
            return [{"type": "optional", "content": _sequence(_free(THINK, END_OF_THINK), _text("\n\n"))}]
        return []

    def behind_reasoning(self, constraint: ConstraintConfig, prompt_end: str) -> ConstraintConfig:
        """Return a constraint that applies to the answer's text only, after the reasoning part."""
        if self.is_harmony:
            tag = {"type": "structural_tag", "format": _sequence(ANALYSIS, _final(_content(constraint)))}
            return ConstraintConfig(structural_tag=tag, whitespace=constraint.whitespace)
        if not self.has_reasoning:
            return constraint
        begin = None if self.is_thinking(prompt_end) else THINK
        return replace(constraint, reasoning_begin=begin, reasoning_end=END_OF_THINK)


def guess_format(template: str) -> str:
    """Guess the tool format, one of config.serving.TOOL_FORMATS, from marks in a chat template."""
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


ANALYSIS: dict[str, object] = {
    "type": "optional",
    "content": _free("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}


FINAL = "<|channel|>final<|message|>"


def _final(content: dict[str, object]) -> dict[str, object]:
    """Return the format of a message on harmony's final channel."""
    return {"type": "tag", "begin": FINAL, "content": content, "end": ""}


def _content(constraint: ConstraintConfig) -> dict[str, object]:
    """Convert a constraint to a structural-tag format."""
    kind, source = constraint.kind, constraint.source
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(source)}
    if kind == "structural_tag":
        return json.loads(source)["format"]
    if kind == "choice":
        return {"type": "or", "elements": [_text(each) for each in json.loads(source)]}
    return {"type": str(kind), "pattern" if kind == "regex" else "grammar": source}
