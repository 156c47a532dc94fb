"""The chat syntax of a model: its parser, and constraints for reasoning and tool calls."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lp_runtime.chat import tags
from lp_runtime.chat.chat_parser import START, AnswerParser, HarmonyParser
from lp_runtime.chat.formats import FORMATS, NO_CALLS, REASONINGS, ReasoningFormat
from lp_runtime.chat.pieces import ChatParser
from lp_runtime.chat.recognition import reasoning_of, recognize
from lp_runtime.chat.template_parser import TemplateParser
from lp_runtime.chat.text_reader import object_in
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.compiled import may_begin_with_space
from lp_runtime.errors import ConfigError, RequestError, first_line
from lp_runtime.model.chat_template import ChatTemplate
from lp_runtime.text.harmony import MESSAGE, content_start
from lp_runtime.text.reasoning import Reasoning

log = logging.getLogger(__name__)

PROMPT_END_TOKENS = 8  # last tokens of a prompt; enough to see whether it ends with an open `<think>`
FINAL = "<|channel|>final<|message|>"  # begins the content of a constrained harmony answer
ANALYSIS = tags.free("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


Tool = Mapping[str, Any]  # in the OpenAI API's format


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may or must call; without tools it is not searched for calls."""

    tools: Sequence[Tool] = ()
    must_call: bool = False
    is_parallel: bool = True

    @property
    def max_calls(self) -> int | None:
        """Number of calls that an answer shows at most; None for no limit."""
        return None if self.is_parallel else 1


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each function tool's arguments, by its name; other entries are left out.

    A function without `parameters` takes none, as in OpenAI's API. Those that are an empty schema may be any object.
    """
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {
        function["name"]: _schema_of(function.get("parameters"))
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }


def _schema_of(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters or {"type": "object"}


class ChatFormat:
    """The syntax of one model's chat answers.

    Args:
        template: the model's chat template, or its text; empty without one.
        tool_format, reasoning: one of TOOL_FORMATS and one of REASONINGS of config.serving.

    Attributes:
        takes_tools: whether the template shows the model its tools.
        tool_format: one of FORMATS; None if it is not known how the model writes calls.
        reasoning: marks of the reasoning part that an answer may begin with; None if there is none.
    """

    def __init__(self, template: str | ChatTemplate, tool_format: str = "auto", reasoning: str = "auto"):
        self._template = template if isinstance(template, ChatTemplate) else ChatTemplate(template)
        recognized = recognize(self._template)
        self.takes_tools, self._wants_text = recognized.takes_tools, recognized.wants_text
        name = recognized.tool_format if tool_format == "auto" else tool_format
        if name == "mistral" and "[ARGS]" in self._template.source:
            name = "mistral_args"
        self.tool_format = name if name in FORMATS else None
        self._uses_own_parser = self._may_use_own_parser(name)
        self.reasoning = REASONINGS.get(reasoning)
        if reasoning == "auto" and not self.is_harmony:
            self.reasoning = reasoning_of(self._template.source)
        if self.reasoning is not None:
            marks, special = (self.reasoning.begin, self.reasoning.end), self._template.special_tokens
            is_special = self.reasoning.is_special or any(mark in special for mark in marks)
            self.reasoning = replace(self.reasoning, is_special=is_special)
        if tool_format == "auto" and recognized.takes_tools:
            self._report(recognized.is_certain)

    def _may_use_own_parser(self, name: str | None) -> bool:
        """Whether the model's response template reads answers; refuse one that transformers cannot read."""
        if self._template.response_template is None and name == "response_template":
            raise ConfigError("tool_format=response_template: the model has no response template")
        if self._template.response_template is None or name not in (None, "response_template"):
            return False
        try:
            self._template.response_parser("", [])
        except ValueError as error:
            raise ConfigError(f"the model's response template: {first_line(error)}") from error
        return True

    def _report(self, is_certain: bool) -> None:
        if self._uses_own_parser:
            log.info("tool calls are read by the model's own response template")
        elif self.tool_format is None:
            log.warning("the chat template writes tool calls in no known form, answers are text; set tool_format")
        elif not is_certain:
            log.warning("the chat template does not show tool calls; tool_format=%s by its marks", self.tool_format)

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages on channels, as in OpenAI's harmony format."""
        return self.tool_format == "harmony"

    def parser(
        self, tools: Sequence[Tool] | bool, prompt_end: str, text: ConstraintConfig | None = None
    ) -> ChatParser | None:
        """Create the parser of an answer; None if answers are plain text.

        `tools` are those that it may call; true if their schemas are not known. `text` is the constraint of its text;
        with one it is either only calls or only text.
        """
        known = [] if isinstance(tools, bool) else list(tools)
        form = FORMATS[self.tool_format] if tools and self.tool_format is not None else NO_CALLS
        if self.is_harmony:
            parser = HarmonyParser(FORMATS["harmony"], schemas=schemas_of(known))
            header, mark, _ = prompt_end.rpartition(START)[2].partition(MESSAGE)
            parser.add(header + mark)  # of a message that the prompt has begun
            return parser
        if self._uses_own_parser:
            return TemplateParser(self._template.response_parser(prompt_end, known))
        if form is NO_CALLS and self.reasoning is None:
            return None
        is_thinking, is_either = self.is_thinking(prompt_end), text is not None
        return AnswerParser(form, self._reasoning_before(text), is_thinking, is_either, schemas_of(known))

    def history(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return a conversation whose calls have arguments as the template expects: an object, or JSON text.

        A `content` that is null becomes empty. An empty list of calls is left out, because templates only check whether
        the key exists.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            return messages  # the chat template refuses them
        known: list[Mapping[str, Any]] = []
        for message in messages:
            changed = {**message}
            if changed.get("content", "") is None:
                changed["content"] = ""
            if isinstance(calls := changed.pop("tool_calls", None), list | tuple) and calls:
                parsed = [_with_object(call) for call in calls]
                changed["tool_calls"] = [_with_text(call) for call in parsed] if self._wants_text else parsed
            known.append(changed)
        return known

    def is_thinking(self, prompt_end: str) -> bool:
        return self.reasoning is not None and self.reasoning.is_opened_by(prompt_end, self._template.tokens)

    def reasoning_marks(self, prompt_end: str, text: ConstraintConfig | None = None) -> Reasoning | None:
        """Return the marks of an answer's reasoning part; None without one. `text` is the constraint of its text."""
        if self.is_harmony:
            return None if _continues_text(prompt_end) else Reasoning("", MESSAGE)
        reasoning = self._reasoning_before(text)
        if reasoning is None:
            return None
        begin = None if self.is_thinking(prompt_end) else reasoning.begin
        return Reasoning(begin, reasoning.end, tuple(mark for mark, _ in reasoning.content), reasoning.hides_space)

    def shows_special_tokens(self, tools: object) -> bool:
        has_calls = bool(tools) and self.tool_format is not None
        is_special = self.reasoning is not None and self.reasoning.is_special
        return self.is_harmony or self._uses_own_parser or has_calls or is_special

    def constraint(
        self, use: ToolUse, text: ConstraintConfig | None, prompt_end: str, may_think: bool = True
    ) -> ConstraintConfig | None:
        """Return the constraint of an answer; None if it may be anything.

        An answer that must be a call consists of calls only. One that may be a call consists of calls only, or of text
        that satisfies the constraint `text`. `may_think`: whether a reasoning part may come first if the prompt has not
        opened one.
        """
        if not use.must_call and text is None:
            return None
        if self.tool_format is None and use.must_call:
            raise RequestError(
                "tool_choice: the format of tool calls is not known for this model; serve with tool_format=..."
            )
        if self.tool_format is None or not use.tools:
            assert text is not None
            return self.after_reasoning(text, prompt_end)
        schemas = schemas_of(use.tools)
        answer, whitespace = tags.calls(FORMATS[self.tool_format], schemas, use.is_parallel), "fixed"
        if text is not None and not use.must_call:
            answer = {"type": "or", "elements": [answer, self._text(text, prompt_end)]}
            whitespace = text.whitespace
        form = tags.sequence(self._reasoning_tag(text, prompt_end, may_think), answer)
        return ConstraintConfig(structural_tag={"type": "structural_tag", "format": form}, whitespace=whitespace)

    def _text(self, text: ConstraintConfig, prompt_end: str) -> tags.Tag:
        content = tags.content(text)
        if self.is_harmony and not _continues_text(prompt_end):
            return {"type": "tag", "begin": FINAL, "content": content, "end": ""}
        around = () if self.reasoning is None else self.reasoning.content
        # The prompt may have begun the content, so the marks may be missing.
        return tags.sequence(
            tags.any_or_none(begin for begin, _ in around), content, tags.any_or_none(end for _, end in around)
        )

    def _reasoning_before(self, text: ConstraintConfig | None) -> ReasoningFormat | None:
        """Return the format of the reasoning before text; white space at its beginning may be part of the text."""
        if self.reasoning is None or text is None or not may_begin_with_space(text):
            return self.reasoning
        return replace(self.reasoning, hides_space=False)

    def _reasoning_tag(self, text: ConstraintConfig | None, prompt_end: str, may_think: bool) -> tags.Tag | None:
        """Return the tag of the reasoning before calls or text; None if there is none."""
        if self.is_harmony:
            may_think &= not _continues_text(prompt_end)
            return {"type": "optional", "content": ANALYSIS} if may_think else None
        is_open, reasoning = self.is_thinking(prompt_end), self._reasoning_before(text)
        if reasoning is None or not (is_open or may_think):
            return None
        return tags.thought(reasoning, is_open)

    def after_reasoning(self, constraint: ConstraintConfig, prompt_end: str) -> ConstraintConfig:
        """Return a constraint that applies to the answer's text only, after the reasoning part."""
        if _continues_text(prompt_end) if self.is_harmony else self.reasoning is None:
            return constraint
        if self.is_harmony or (self.reasoning is not None and self.reasoning.is_special):
            # Only structural tags may contain special tokens.
            thought = self._reasoning_tag(constraint, prompt_end, True)
            form = tags.sequence(thought, self._text(constraint, prompt_end))
            tag = {"type": "structural_tag", "format": form}
            return ConstraintConfig(structural_tag=tag, whitespace=constraint.whitespace)
        marks = self.reasoning_marks(prompt_end)
        assert marks is not None
        return replace(constraint, reasoning_begin=marks.begin, reasoning_end=marks.end)


def _continues_text(prompt_end: str) -> bool:
    """Whether a harmony prompt ends inside a message that is content."""
    _, start, message = prompt_end.rpartition(START)
    return bool(start) and content_start(message) is not None


def _with_text(call: Any) -> Any:
    """Return a call whose arguments are JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_object(call: Any) -> Any:
    """Return a call whose arguments are an object, {} if they are other JSON; keep one that has none, or no JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    sent = value = function["arguments"]
    if isinstance(sent, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(sent.strip() or "{}")
    if isinstance(value, str):
        text = object_in(value)
        if text is None and value is sent:
            return call
        value = json.loads(text or "{}")
    return {**call, "function": {**function, "arguments": value if isinstance(value, Mapping) else {}}}
