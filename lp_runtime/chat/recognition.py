"""Recognition of the format in which a model's chat template writes tool calls."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import NamedTuple

import regex

from lp_runtime.chat.chat_parser import AnswerParser, HarmonyParser
from lp_runtime.chat.formats import FORMATS, REASONINGS, CallFormat, ReasoningFormat
from lp_runtime.model.chat_template import ChatTemplate

QUESTION = {"role": "user", "content": "How is the weather?"}
NAME, ARGUMENTS = "get_weather_of", {"city": "Rome", "days": 7}
CALL_IDS = ("a1B2c3D4e", f"functions.{NAME}:0")  # as Mistral's templates want them, and as Kimi's
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of a city"},
        "days": {"type": "integer", "description": "Number of days"},
    },
    "required": ["city", "days"],
}
FUNCTION = {"name": NAME, "description": "Forecast of the weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
TAG = regex.compile(r"<[^/<>$\s][^<>$\s]*>?|\[[A-Z_]+\]|\w+\[")
OPEN_TAG = regex.compile(r"[<\[][^>\]\s]*$")


class Recognized(NamedTuple):
    """The use that a chat template makes of tools."""

    takes_tools: bool = False  # whether it shows the model its tools
    tool_format: str | None = None  # one of FORMATS; None if calls are written in none of them, or not at all
    is_certain: bool = False  # whether `tool_format` reads a call that the template writes; else a guess by marks
    wants_text: bool = False  # whether arguments of earlier calls are written as they are, so that they must be JSON


def recognize(template: ChatTemplate) -> Recognized:
    """Render a call with a template, and find the format that reads it back."""
    takes_tools, marked, is_shown = _shows_tools(template), _marked(template), False
    for wants_text, prompt, answer in _answers(template):
        names = _readers(answer, prompt, reasoning_of(template.source))
        # Templates may write calls without the mark that their models write.
        if names and (FORMATS[names[0]].mark or marked in (None, names[0])):
            return Recognized(takes_tools, names[0], True, wants_text)
        if names:
            return Recognized(takes_tools, marked, False, wants_text)
        is_shown |= NAME in answer
    return Recognized(takes_tools, None if is_shown else marked)


def reasoning_of(source: str) -> ReasoningFormat | None:
    """Return the marks of reasoning that a template's text has; None if it has none."""
    return next((each for each in REASONINGS.values() if each.end in source), None)


def _shows_tools(template: ChatTemplate) -> bool:
    try:
        return template.render([QUESTION], [TOOL]) != template.render([QUESTION])
    except Exception:  # templates are programs and may raise anything
        return "tools" in template.source


def _answers(template: ChatTemplate) -> Iterator[tuple[bool, str, str]]:
    """Yield (wants_text, end of the prompt, answer) for each way in which the template writes the call."""
    for wants_text in (False, True):
        for call_id in CALL_IDS:
            arguments = json.dumps(ARGUMENTS) if wants_text else ARGUMENTS
            call = {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                whole = template.render([QUESTION, answer], [TOOL])
                prompt = os.path.commonprefix([whole, template.render([QUESTION], [TOOL], add_generation_prompt=True)])
            except Exception:  # templates are programs and may raise anything
                continue
            prompt = OPEN_TAG.sub("", prompt)  # the mark of a call and that of reasoning may begin equally
            yield wants_text, prompt, whole[len(prompt) :]


def _readers(answer: str, prompt: str, reasoning: ReasoningFormat | None) -> list[str]:
    """Return the formats that read the call in an answer, those first that leave the least text."""
    is_thinking = reasoning is not None and reasoning.is_opened_by(prompt.rpartition(QUESTION["content"])[2])
    lengths = {name: _rest(form, answer, reasoning, is_thinking) for name, form in FORMATS.items()}
    return sorted((name for name in FORMATS if lengths[name] is not None), key=lambda name: lengths[name] or 0)


def _rest(form: CallFormat, answer: str, reasoning: ReasoningFormat | None, is_thinking: bool) -> int | None:
    """Return how many characters next to the call a format reads as text; None if it misses the call."""
    kind = HarmonyParser if form is FORMATS["harmony"] else AnswerParser
    parser = kind(form, reasoning, is_thinking, schemas={NAME: SCHEMA}, is_strict=True)
    pieces = [*parser.add(answer), *parser.finish()]
    arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    try:
        is_read = [piece.name for piece in pieces if piece.name] == [NAME] and json.loads(arguments) == ARGUMENTS
    except ValueError:
        return None
    return sum(len(piece.text) for piece in pieces if piece.kind == "content") if is_read else None


def _marked(template: ChatTemplate) -> str | None:
    """Return the format most of whose marks occur in a template's text or vocabulary, and none is missing."""
    text = "\n".join([template.source, *template.tokens])
    candidates = {
        name: tags for name, form in FORMATS.items() if (tags := _tags(form)) and all(tag in text for tag in tags)
    }
    return max(candidates, key=lambda name: len(candidates[name]), default=None)


def _tags(form: CallFormat) -> list[str]:
    style = form.style
    tags = [tag for text in (form.begin, form.call, style.open if style else "") for tag in TAG.findall(text)]
    return tags or [mark for mark, _ in form.also][:1]
