"""Reader of a streamed text: generators that read as if all text were there, and wait where it is not."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import regex

from lp_runtime.chat.arguments import Parameter, dumped, json_of
from lp_runtime.chat.patterns import ArgumentPatterns, Pattern

T = TypeVar("T")
Steps = Generator[None, None, T]  # waits for more text at each `yield`
Out = Callable[[str], object]  # receives text as it comes

MAX_MATCH_CHARS = 4096  # that a match waits for; bounds the text that is held back
SPACE = regex.compile(r"\s*")
JSON_START = regex.compile(r'["\[{]|(?=[\s,;}\]<])')  # what begins a JSON value, or ends a number or word
JSON_INNER = regex.compile(r'["\[\]{}]')
REST_OF_STRING = regex.compile(r'(?:[^"\\]++|\\.)*+(?P<end>"?)', regex.DOTALL)  # of JSON, as much as there is
BRACKETS = {**dict.fromkeys("[{(", 1), **dict.fromkeys(")}]", -1)}
IN_JSON = {"(": "[", ")": "]", ",": ", ", ":": ": "}  # marks of literals
NUMBER = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class TextReader:
    """A text that grows at its end and is consumed from its beginning."""

    def __init__(self) -> None:
        self._text, self._is_end = "", False
        self._at = 0  # characters consumed
        self._kept: int | None = None  # where `rewind` goes back to

    def add(self, text: str) -> None:
        start = self._at if self._kept is None else self._kept
        self._text, self._at = self._text[start:] + text, self._at - start
        self._kept = None if self._kept is None else 0

    def end(self) -> None:
        self._is_end = True

    @property
    def is_over(self) -> bool:
        return self._is_end and self._at == len(self._text)

    def keep(self, is_kept: bool = True) -> None:
        """Keep the text from here on for `rewind`, or no text."""
        self._kept = self._at if is_kept else None

    def rewind(self) -> None:
        """Go back to where `keep` was called, and keep no text."""
        if self._kept is not None:
            self._at, self._kept = self._kept, None

    def match(self, pattern: Pattern) -> Steps[Any]:
        """Consume and return a match at the start of the text, once it cannot grow; None if there is none."""
        while True:
            match = pattern.match(self._text, self._at, partial=not self._is_end)
            if match is None or (match.partial and len(self._text) - self._at > MAX_MATCH_CHARS):
                return None
            if self._is_end or not (match.partial or match.end() == len(self._text)):
                self._at = match.end()
                return match
            yield

    def match_all(self, patterns: Sequence[Pattern]) -> Steps[bool]:
        """Consume a match of each pattern that has one, also one that is cut; return whether one has."""
        is_any = False
        for pattern in patterns:
            match = yield from self.match(pattern)
            is_any |= match is not None
            if match is None and self._is_end and pattern.fullmatch(self._text, self._at, partial=True):
                self._at = len(self._text)
        return is_any

    def until(self, pattern: Pattern, out: Out) -> Steps[Any]:
        """Pass text to `out` up to a match, which is consumed and returned; None at the end of the text."""
        while True:
            match = pattern.search(self._text, self._at, partial=not self._is_end)
            start, self._at = self._at, len(self._text) if match is None else match.start()
            if self._at > start:
                out(self._text[start : self._at])
            if match is not None and not match.partial:
                self._at = match.end()
                return match
            if self._is_end:
                return None
            yield

    def json(self, out: Out) -> Steps[None]:
        yield from self.match(SPACE)
        depth = 0
        while (mark := (yield from self.until(JSON_INNER if depth else JSON_START, out))) is not None:
            out(mark.group())
            depth += BRACKETS.get(mark.group(), 0)
            if mark.group() == '"':
                yield from self._json_string(out)
            if not depth:
                return

    def _json_string(self, out: Out) -> Steps[None]:
        while True:
            rest = REST_OF_STRING.match(self._text, self._at)
            start, self._at = self._at, len(self._text) if self._is_end and not rest["end"] else rest.end()
            if self._at > start:
                out(self._text[start : self._at])
            if rest["end"] or self._is_end:
                return
            yield

    def plain(self, close: Pattern, parameter: Parameter, out: Out) -> Steps[None]:
        """Pass plain text, which a mark ends, to `out` as JSON; text that is cut is left open."""
        if parameter.is_text:
            out('"')
            if (yield from self.until(close, lambda text: out(dumped(text)[1:-1]))) is not None:
                out('"')
            return
        raw = list[str]()
        if (yield from self.until(close, raw.append)) is not None:
            out(json_of("".join(raw), parameter))

    def literal(self, patterns: ArgumentPatterns, parameter: Parameter, out: Out) -> Steps[None]:
        """Pass a literal to `out` as JSON; a text is read as another type if the parameter takes no texts."""
        raw = list[str]()
        write = out if parameter.may_be_text else raw.append
        marks = _Marks(write)
        while (part := (yield from self.match(patterns.inner if marks.depth else patterns.value))) is not None:
            is_key = marks.before(part["mark"])
            if (quote := part["quote"]) is not None:
                yield from self._quoted(patterns, quote, write)
            elif (words := part["words"]) is not None:
                write(dumped(words) if is_key or (parameter.is_text and not marks.depth) else _word(words))
            if not marks.depth:
                break
        text = "".join(raw)
        out(json_of(json.loads(text), parameter) if text.startswith('"') and not self.is_over else text)

    def _quoted(self, patterns: ArgumentPatterns, quote: str, out: Out) -> Steps[None]:
        """Pass a text after its quotation mark to `out` as JSON, and the texts that Python would append to it."""
        out('"')
        close = patterns.quotes[quote]
        while (mark := (yield from self.until(close, lambda text: out(dumped(text)[1:-1])))) is not None:
            if mark.group() not in patterns.quotes:
                out(_escape(mark.group()))
            elif (appended := (yield from self.match(patterns.quote))) is not None:
                close = patterns.quotes[appended["quote"]]
            else:
                out('"')
                return


class _Marks:
    """Writes the brackets, commas and colons of a literal as JSON."""

    def __init__(self, write: Out):
        self._write = write
        self._open, self._last = list[str](), ""  # brackets that are not closed, and the mark before the current token
        self._is_comma_due = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def before(self, mark: str | None) -> bool:
        """Write a mark, or what comes before a text or word; return whether an object's key may come there."""
        is_closing = mark is not None and BRACKETS.get(mark, 0) < 0
        if self._is_comma_due and not is_closing:  # Python allows a last comma, JSON does not
            self._write(IN_JSON[","])
        self._is_comma_due = mark == ","
        if mark is None:
            return self._open[-1:] == ["{"] and self._last in "{,"
        self._last = mark
        if is_closing:
            self._open.pop()
        elif mark in BRACKETS:
            self._open.append(mark)
        if not self._is_comma_due:
            self._write(IN_JSON.get(mark, mark))
        return False


def _word(word: str) -> str:
    """Return a literal's words as JSON: a number, a constant, or a text without quotation marks."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    return word if NUMBER.fullmatch(word) or word in CONSTANTS.values() else dumped(word)


def _escape(escape: str) -> str:
    try:
        return json.dumps(ast.literal_eval(f'"{escape}"'))[1:-1]
    except (SyntaxError, ValueError):
        return dumped(escape)[1:-1]
