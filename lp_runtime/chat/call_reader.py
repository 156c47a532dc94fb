"""Reader of one tool call of an answer, in a known format."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import regex

from lp_runtime.chat.arguments import dumped, parameter_of
from lp_runtime.chat.formats import CallFormat, ParameterStyle
from lp_runtime.chat.patterns import Pattern, argument_patterns, call_patterns
from lp_runtime.chat.pieces import NewPieces, new_call_id
from lp_runtime.chat.text_reader import SPACE, Steps, TextReader

ARGUMENTS = ("arguments", "parameters")
STRING = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
KNOWN_KEY = regex.compile(r'\s*"(name|arguments|parameters|type|id)"\s*:\s*')  # before an object is known to be a call
NEXT_KEY = regex.compile(rf"\s*,\s*{STRING}\s*:\s*", regex.DOTALL)
SCALAR = regex.compile(rf"{STRING}|[\w.+-]+", regex.DOTALL)
COMMA, OPEN, CLOSE = regex.compile(r"\s*,"), regex.compile(r"\{"), regex.compile(r"\s*\}")


class NotACallError(Exception):
    """Raised when text that began like a call turns out to be none."""


class CallReader:
    """Reads calls of a text, in one format, into pieces.

    Args:
        schemas: JSON schema of each tool's arguments, by its name.
        known: names of the tools that calls without the marks of their format may name.
    """

    def __init__(
        self,
        form: CallFormat,
        text: TextReader,
        pieces: NewPieces,
        schemas: Mapping[str, Mapping[str, Any]],
        known: Collection[str],
    ):
        self._form, self._tail = form, call_patterns(form).tail
        self._text, self._pieces = text, pieces
        self._schemas, self._known = schemas, known

    def read(self, head: Pattern, is_marked: bool, is_known: bool) -> Steps[None]:
        """Read a call that begins with `head`; raise NotACallError if the text is none; `is_known`: see `object`."""
        form = self._form
        opening = yield from self._text.match(head)
        if opening is None:
            raise NotACallError
        if form.is_object:
            yield from self.object(is_known, is_marked)
            yield from self._text.match_all(self._tail)
            return
        groups = opening.groupdict()
        name, is_unmarked = groups["name"], groups.get("object") is not None
        has_arguments = groups.get("value") is not None or is_unmarked
        is_certain = groups.get("prefix", "") is not None and not is_unmarked and (has_arguments or form.tail)
        if not is_certain and name not in self._known:
            raise NotACallError
        if form.style is not None:
            yield from self._keyed(form.style, name)
            return
        self._begin(name, groups)
        if has_arguments:
            yield from self._text.arguments(self._pieces.arguments, may_end_text=not form.tail)
        elif not self._text.is_cut:
            self._pieces.arguments("{}")
        yield from self._text.match_all(self._tail)

    def object(self, is_known: bool, is_marked: bool = False) -> Steps[None]:
        """Read a JSON object with a name and arguments, in any order; other keys are skipped.

        With `is_known`, it is a call only if it names a known tool; without arguments also if it has no mark.
        """
        text, name, early = self._text, None, list[str]()  # early: arguments that come before the name, or are missing
        is_ended = False
        yield from text.match(OPEN)
        while name is None or not early:
            key = yield from text.match(KNOWN_KEY)
            if key is None:
                raise NotACallError
            if key[1] not in ARGUMENTS:
                name = yield from self._name(key[1], name)
            elif name is None:
                yield from text.arguments(early.append)
            else:
                break
            if name is not None and not early and (yield from text.match(CLOSE)) is not None:
                is_ended = True
                early.append("{}")
            elif (name is None or not early) and (yield from text.match(COMMA)) is None:
                raise NotACallError
        if name not in self._known and (is_known or (is_ended and not is_marked)):
            raise NotACallError
        self._begin(name)
        self._pieces.arguments("".join(early))
        if not is_ended:
            yield from self._end_of_object(bool(early))

    def _end_of_object(self, has_arguments: bool) -> Steps[None]:
        """Read the arguments if they come last, then skip other keys."""
        text = self._text
        if not has_arguments:
            yield from text.arguments(self._pieces.arguments)
        while (yield from text.match(NEXT_KEY)) is not None:
            yield from text.json(len)  # not shown
        yield from text.match(CLOSE)

    def _name(self, key: str, name: str | None) -> Steps[str | None]:
        """Read a value that comes before a call's arguments; return the call's name, if it is known then."""
        value = yield from self._text.match(SCALAR)
        if value is None or (key == "name" and value[1] is None):
            raise NotACallError
        return _unescaped(value[1]) if key == "name" else name

    def _keyed(self, style: ParameterStyle, name: str) -> Steps[None]:
        """Read arguments that are written one after another, up to and including the call's tail."""
        text, patterns = self._text, argument_patterns(self._form, style)
        key = yield from text.match(patterns.key)
        is_ended = key is None and not text.is_cut_in_match and (yield from text.match_all(self._tail))
        if key is None and not is_ended:
            raise NotACallError
        self._begin(name)
        self._pieces.arguments("{")
        while key is not None:
            self._pieces.arguments(dumped(key["key"]) + ": ")
            parameter = parameter_of(self._schemas.get(name), key["key"], key.groupdict().get("string"))
            if patterns.close is not None:
                yield from text.plain(patterns, parameter, self._pieces.arguments)
            else:
                yield from text.literal(patterns, parameter, self._pieces.arguments)
            key = yield from text.match(patterns.key)
            if key is not None:
                self._pieces.arguments(", ")
            else:
                is_ended = yield from text.match_all(self._tail)
                yield from text.match(SPACE)
                if not is_ended and text.is_end_cut:
                    text.skip_cut(patterns.key)
        # Arguments that are cut are left open, and so are literals, which nothing but their marks ends.
        if is_ended or not (text.is_cut if style.close else text.is_over):
            self._pieces.arguments("}")

    def _begin(self, name: str, placeholders: Mapping[str, str | None] | None = None) -> None:
        self._text.keep(False)
        self._pieces.begin_call(name, new_call_id(self._form.call_id, placeholders))


def _unescaped(text: str) -> str:
    """Unescape a JSON string; models also write escapes that JSON does not have, such as Markdown's."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return regex.sub(r"\\(.)", r"\1", text)
