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
        """Consume a match of each pattern that has one, also one that is cut; return whether the first has."""
        first = None
        for pattern in patterns:
            match = yield from self.match(pattern)
            first = match if pattern is patterns[0] else first
            if match is None and self._is_end and pattern.fullmatch(self._text, self._at, partial=True):
                self._at = len(self._text)
        return first is not None

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
        raw, depth = list[str](), 0
        write = out if parameter.may_be_text else raw.append
        while (part := (yield from self.match(patterns.inner if depth else patterns.value))) is not None:
            if (quote := part["quote"]) is not None:
                yield from self._quoted(patterns.quotes[quote], quote, write)
            elif (word := part["word"]) is not None:
                write(dumped(word) if parameter.is_text and not depth else _word(word))
            else:
                depth += BRACKETS.get(part["mark"], 0)
                write(IN_JSON.get(part["mark"], part["mark"]))
            if not depth:
                break
        text = "".join(raw)
        out(json_of(json.loads(text), parameter) if text.startswith('"') and not self.is_over else text)

    def _quoted(self, close: Pattern, quote: str, out: Out) -> Steps[None]:
        """Pass a text after its quotation mark to `out` as JSON."""
        out('"')
        while (mark := (yield from self.until(close, lambda text: out(dumped(text)[1:-1])))) is not None:
            if mark.group() == quote:
                out('"')
                return
            out(_escape(mark.group()))


def _word(word: str) -> str:
    """Return a literal's word as JSON: a number, a constant, or a key without quotation marks."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    return word if NUMBER.fullmatch(word) or word in CONSTANTS.values() else dumped(word)


def _escape(escape: str) -> str:
    try:
        return json.dumps(ast.literal_eval(f'"{escape}"'))[1:-1]
    except (SyntaxError, ValueError):
        return dumped(escape)[1:-1]
