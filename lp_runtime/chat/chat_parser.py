"""Streaming parser that splits a chat answer into reasoning, text and tool calls."""

from __future__ import annotations

import itertools
import json
import secrets
import string
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import regex

from lp_runtime.chat.arguments import dumped, parameter_of
from lp_runtime.chat.formats import LONG_ID, SHORT_ID, CallFormat, ParameterStyle, ReasoningFormat
from lp_runtime.chat.patterns import NEVER, Pattern, any_of, argument_patterns, call_patterns
from lp_runtime.chat.text_reader import SPACE, Steps, TextReader
from lp_runtime.text.harmony import ANALYSIS, MESSAGE, MESSAGE_START

Kind = Literal["reasoning", "content", "arguments"]

CHARS_AT_ONCE = 4096  # that a parser reads: what turns out to be no call is read again
ARGUMENTS = ("arguments", "parameters")
STRING = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
KNOWN_KEY = regex.compile(r'\s*"(name|arguments|parameters|type|id)"\s*:\s*')  # before an object is known to be a call
NEXT_KEY = regex.compile(rf"\s*,\s*{STRING}\s*:\s*", regex.DOTALL)
SCALAR = regex.compile(rf"{STRING}|[\w.+-]+", regex.DOTALL)
LOOSE_END = regex.compile(r"[\s\]}]*")
OBJECT_START = regex.compile(r"[\s,;\[]*(?=\{)")
COMMA, OPEN, CLOSE = regex.compile(r"\s*,"), regex.compile(r"\{"), regex.compile(r"\s*\}")
START = f"{MESSAGE_START}assistant"
RECIPIENT = regex.compile(r"to=(functions\.)?([\w.-]+)")
TEXT_START, TEXT_END = regex.compile(regex.escape(MESSAGE)), regex.compile(r"<\|(?:end|call|return|start)\|>")


@dataclass(frozen=True)
class Piece:
    """A fragment of one part of an answer. The text of "arguments" is JSON."""

    kind: Kind
    text: str
    call: int = 0  # index of the call that arguments belong to
    name: str | None = None  # of the tool; in a call's first piece only
    call_id: str | None = None  # in a call's first piece only


class ChatParser(ABC):
    """Splits one streamed answer into pieces."""

    num_calls = 0

    @abstractmethod
    def add(self, text: str) -> list[Piece]:
        """Append text; return the new pieces."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the answer."""


class NotACallError(Exception):
    """Raised when text that began like a call turns out to be none."""


class AnswerParser(ChatParser):
    """Parser of an answer in a known format.

    Args:
        form: None if the answer is not searched for calls.
        is_thinking: whether the prompt has already opened the reasoning part.
        is_either: whether the answer, after its reasoning part, is either only calls or only text.
        schemas: JSON schema of each tool's arguments, by its name.
        is_strict: whether calls must have the format's own marks and all that it writes before arguments.
    """

    chars_at_once = CHARS_AT_ONCE

    def __init__(
        self,
        form: CallFormat | None,
        reasoning: ReasoningFormat | None = None,
        is_thinking: bool = False,
        is_either: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        is_strict: bool = False,
    ):
        self._form, self._schemas = form, schemas or {}
        is_exact = is_strict or is_either  # as constrained answers are
        self._known = frozenset[str]() if is_exact else self._schemas.keys()  # tools that loose calls may name
        self._reasoning, self._is_thinking = reasoning, is_thinking
        self._is_either = is_either
        self._loose = {} if form is None or not self._known else dict(form.loose)
        self._marks = NEVER
        if form is not None:
            self._marks = call_patterns(form).loose_marks if self._loose else call_patterns(form).marks
        self._text, self._pieces = TextReader(), list[Piece]()
        self._steps = self._answer()

    def add(self, text: str) -> list[Piece]:
        for start in range(0, len(text), self.chars_at_once):
            self._text.add(text[start : start + self.chars_at_once])
            next(self._steps, None)
        return self._new_pieces()

    def finish(self) -> list[Piece]:
        self._text.end()
        next(self._steps, None)
        return self._new_pieces()

    def _new_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return _joined(pieces)

    def _content(self, text: str) -> None:
        self._pieces.append(Piece("content", text))

    def _thought(self, text: str) -> None:
        self._pieces.append(Piece("reasoning", text))

    def _arguments(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("arguments", text, self.num_calls - 1))

    def _begin_call(self, name: str, call_id: str) -> None:
        self._text.keep(False)
        self._pieces.append(Piece("arguments", "", self.num_calls, name, call_id))
        self.num_calls += 1

    def _answer(self) -> Steps[None]:
        yield from self._think()
        around = () if self._reasoning is None else self._reasoning.content
        if around:
            yield from self._text.match(regex.compile(rf"\s*(?:{any_of(begin for begin, _ in around)})"))
        ends = [end for _, end in around]
        form = self._form
        if form is not None and (yield from self._begins_with_a_call(form)):
            yield from self._calls(form, "")
        elif form is not None and "" in self._loose:
            yield from self._loose_calls(form, "")
        while (mark := (yield from self._text.until(self._marks_or(ends), self._content))) is not None:
            if mark.group() in ends:
                continue
            assert form is not None
            read = self._loose_calls if mark.group() in self._loose else self._calls
            yield from read(form, mark.group())

    def _marks_or(self, texts: Sequence[str]) -> Pattern:
        return regex.compile(f"{any_of(texts)}|{self._marks.pattern}") if texts else self._marks

    def _think(self) -> Steps[None]:
        if self._reasoning is None:
            return
        begun = yield from self._text.match(regex.compile(r"\s*" + regex.escape(self._reasoning.begin)))
        if begun is None and not self._is_thinking:
            return
        end = regex.escape(self._reasoning.end)
        calls = NEVER if self._form is None else call_patterns(self._form).marks
        marks, is_ended = regex.compile(f"(?P<end>{end})|{calls.pattern}"), False
        while not is_ended and (mark := (yield from self._text.until(marks, self._thought))) is not None:
            is_ended = mark["end"] is not None or (yield from self._drafts(mark.group(), regex.compile(end)))
        if self._reasoning.hides_space:
            yield from self._text.match(SPACE)

    def _drafts(self, mark: str, end: Pattern) -> Steps[bool]:
        """Hold calls in reasoning back: they count if the answer ends with them. Return whether the reasoning ends."""
        draft, held, pieces = _DraftParser(self._form, schemas=self._schemas), list[str](), list[Piece]()

        def hold(text: str) -> None:
            held.append(text)
            pieces.extend(draft.add(text))

        if not (yield from self._may_begin_calls(mark)):
            self._thought(mark)
            return False
        try:
            hold(mark)
            if (yield from self._text.until(end, hold)) is not None:
                pieces = [Piece("reasoning", "".join(held))]
            else:
                pieces.extend(draft.finish())
        except NotACallError:
            whole = "".join(held)
            num_read = len(whole) - draft.num_unread
            self._thought(whole[:num_read])
            self._text.put_back(whole[num_read:])
            return False
        self._pieces += pieces
        self.num_calls = sum(piece.name is not None for piece in pieces)
        return True

    def _may_begin_calls(self, mark: str) -> Steps[bool]:
        """Return whether what follows a mark may be a call; consume nothing."""
        assert self._form is not None
        text = self._text
        text.keep()
        head = yield from text.match(call_patterns(self._form).heads[mark])
        may_begin = head is not None and not (self._form.is_object and (yield from text.match(OPEN)) is None)
        text.rewind()
        return may_begin

    def _begins_with_a_call(self, form: CallFormat) -> Steps[bool]:
        """Return whether the rest may be a call without a mark; if it must be text, look for no more marks."""
        bare = call_patterns(form).bare
        if bare is not None and (yield from self._text.match(bare)) is not None:
            return True
        begin = regex.compile(rf"(?=\s*(?:{self._marks.pattern}))")
        if self._is_either and (yield from self._text.match(begin)) is None:
            self._marks = NEVER
        return False

    def _calls(self, form: CallFormat, mark: str) -> Steps[None]:
        """Read the calls that follow a mark; what is not a call is text, as the mark is without one."""
        patterns, num_before = call_patterns(form), self.num_calls
        head = patterns.heads[mark]
        while head is not None:
            self._text.keep()
            try:
                yield from self._call(form, head, bool(mark))
            except NotACallError:
                self._text.rewind()
                break
            head = patterns.following
        if self.num_calls > num_before:
            yield from self._text.match_all(patterns.end)
            return
        if mark:
            self._content(mark)
        if self._is_either:
            self._marks = NEVER

    def _loose_calls(self, form: CallFormat, mark: str) -> Steps[None]:
        """Read the calls of known tools that follow a loose mark; what is not a call is text, as the mark is."""
        num_before = self.num_calls
        while True:
            self._text.keep()
            try:
                if (yield from self._text.match(OBJECT_START)) is None:
                    raise NotACallError
                yield from self._object(form, is_known=True)
            except NotACallError:
                self._text.rewind()
                break
        if self.num_calls > num_before:
            yield from self._text.match_all([LOOSE_END, regex.compile(r"\s*" + regex.escape(self._loose[mark])), SPACE])
        elif mark:
            self._content(mark)

    def _call(self, form: CallFormat, head: Pattern, is_marked: bool) -> Steps[None]:
        opening = yield from self._text.match(head)
        if opening is None:
            raise NotACallError
        if form.is_object:
            yield from self._object(form, is_marked=is_marked)
            yield from self._text.match_all(call_patterns(form).tail)
            return
        groups = opening.groupdict()
        name, has_arguments = groups["name"], groups.get("value") is not None
        is_certain = groups.get("prefix", "") is not None and (has_arguments or form.tail)
        if not is_certain and name not in self._known:
            raise NotACallError
        if form.style is not None:
            yield from self._keyed(form, form.style, name)
            return
        self._begin_call(name, new_call_id(form.call_id, groups))
        if has_arguments:
            yield from self._text.arguments(self._arguments, may_end_text=not form.tail)
        else:
            self._arguments("{}")
        yield from self._text.match_all(call_patterns(form).tail)

    def _object(self, form: CallFormat, is_known: bool = False, is_marked: bool = False) -> Steps[None]:
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
        self._begin_call(name, new_call_id(form.call_id))
        self._arguments("".join(early))
        if not is_ended:
            yield from self._end_of_object(bool(early))

    def _end_of_object(self, has_arguments: bool) -> Steps[None]:
        """Read the arguments if they come last, then skip other keys."""
        text = self._text
        if not has_arguments:
            yield from text.arguments(self._arguments)
        while (yield from text.match(NEXT_KEY)) is not None:
            yield from text.json(len)  # not shown
        yield from text.match(CLOSE)

    def _name(self, key: str, name: str | None) -> Steps[str | None]:
        """Read a value that comes before a call's arguments; return the call's name, if it is known then."""
        value = yield from self._text.match(SCALAR)
        if value is None or (key == "name" and value[1] is None):
            raise NotACallError
        return unescaped(value[1]) if key == "name" else name

    def _keyed(self, form: CallFormat, style: ParameterStyle, name: str) -> Steps[None]:
        """Read arguments that are written one after another, up to and including the call's tail."""
        text, patterns, tail = self._text, argument_patterns(form, style), call_patterns(form).tail
        key = yield from text.match(patterns.key)
        is_ended = key is None and (yield from text.match_all(tail))
        if key is None and not is_ended:
            raise NotACallError
        self._begin_call(name, new_call_id(form.call_id))
        self._arguments("{")
        while key is not None:
            self._arguments(dumped(key["key"]) + ": ")
            parameter = parameter_of(self._schemas.get(name), key["key"], key.groupdict().get("string"))
            if patterns.close is not None:
                yield from text.plain(patterns, parameter, self._arguments)
            else:
                yield from text.literal(patterns, parameter, self._arguments)
            key = yield from text.match(patterns.key)
            if key is not None:
                self._arguments(", ")
            else:
                is_ended = yield from text.match_all(tail)
                yield from text.match(SPACE)
        if is_ended or not text.is_over:  # arguments that are cut are left open
            self._arguments("}")


class _DraftParser(AnswerParser):
    """Parser of calls that raises NotACallError at a text next to them; `num_unread` characters are left from there."""

    chars_at_once = sys.maxsize  # so that `num_unread` counts all
    num_unread = 0

    def _content(self, text: str) -> None:
        if text.strip():
            is_mark = self._marks.fullmatch(text) is not None  # of no call; it counts as read
            self.num_unread = self._text.num_unread + (0 if is_mark else len(text))
            raise NotACallError


class HarmonyParser(AnswerParser):
    """Parser for harmony's channels: analysis is reasoning, a message to functions.NAME is a call."""

    def _answer(self) -> Steps[None]:
        head = list[str]()
        while (yield from self._text.until(TEXT_START, head.append)) is not None:
            header, recipient = "".join(head), RECIPIENT.search("".join(head))
            head.clear()
            is_call = recipient is not None and (recipient[1] is not None or recipient[2] in self._known)
            if is_call:
                self._begin_call(recipient[2], new_call_id())
                yield from self._text.arguments(self._arguments, may_end_text=True)
            shown = len if is_call else self._thought if ANALYSIS in header else self._content
            yield from self._text.until(TEXT_END, shown)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces in which those of one part are joined, because each becomes an event of a stream."""
    groups = itertools.groupby(pieces, lambda piece: (piece.kind, piece.call, piece.call_id))
    parts = [list(group) for _, group in groups]
    return [replace(part[0], text="".join(piece.text for piece in part)) if part[1:] else part[0] for part in parts]


def new_call_id(text: str = LONG_ID, values: Mapping[str, str | None] | None = None) -> str:
    """Return an id of a call; `values` are those of a format's placeholders, by their names in lower case."""
    if text == SHORT_ID:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    if text == LONG_ID:
        return f"call_{uuid.uuid4().hex[:24]}"
    for name, value in (values or {}).items():
        text = text.replace(f"${name.upper()}", value or "")
    return text


def unescaped(text: str) -> str:
    """Unescape a JSON string; models also write escapes that JSON does not have, such as Markdown's."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return regex.sub(r"\\(.)", r"\1", text)
