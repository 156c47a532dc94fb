"""Reader of a streamed text: generators that read as if all text were there, and wait where it is not."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import regex

from lp_runtime.chat.arguments import Parameter, dumped, json_of
from lp_runtime.chat.patterns import JSON, ArgumentPatterns, Pattern

T = TypeVar("T")
Steps = Generator[None, None, T]  # waits for more text at each `yield`
Out = Callable[[str], object]  # receives text as it comes

MAX_MATCH_CHARS = 4096  # that a match waits for; bounds the text that is held back
SPACE = regex.compile(r"\s*")
NOT_SPACE = regex.compile(r"(?=\S)")
VALUE_START = regex.compile(r'\s*(?=([{"]))')  # of an object, or of a text that may hold one
JSON_START = regex.compile(r'["\[{]|(?=[\s,;}\]<])')  # what begins a JSON value, or ends a number or word
# Inside of brackets; what Python writes otherwise, and a last comma, which JSON does not have.
JSON_INNER = regex.compile(r'["\[\]{}]|\b(?:True|False|None)\b|,(?=\s{0,32}[}\]])')
DEPTHS = {**dict.fromkeys("[{", 1), **dict.fromkeys("]}", -1)}
CLOSING = {"}": "}", "]": "]", ")": "]"}  # in JSON
JSON_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
JSON_TEXT = regex.compile(rf'(?:[^"\\\x00-\x1f]++|{JSON_ESCAPE.pattern})*+')
NUMBER = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class TextReader:
    """A text that grows at its end and is consumed from its beginning."""

    def __init__(self) -> None:
        self._text, self._is_end = "", False
        self.is_end_cut = False  # whether a limit has ended the text, not its writer
        self._at = 0  # characters consumed
        self._kept: int | None = None  # where `rewind` goes back to
        self.is_cut_in_match = False  # whether a limit has ended the text inside what the last `match` looked for

    def add(self, text: str) -> None:
        start = self._at if self._kept is None else self._kept
        self._text, self._at = self._text[start:] + text, self._at - start
        self._kept = None if self._kept is None else 0

    def end(self, is_cut: bool = False) -> None:
        self._is_end, self.is_end_cut = True, is_cut

    @property
    def is_over(self) -> bool:
        return self._is_end and not self.num_unread

    @property
    def is_cut(self) -> bool:
        """Whether all is read of a text that is cut."""
        return self.is_over and self.is_end_cut

    def put_back(self, text: str) -> None:
        """Let text be read again before what is unread."""
        self._text, self._at = text + self._text[self._at :], 0

    @property
    def num_unread(self) -> int:
        return len(self._text) - self._at

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
                self.is_cut_in_match = self.is_end_cut and self._begins(pattern)
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
            if match is None:
                self.skip_cut(pattern)
        return is_any

    def skip_cut(self, pattern: Pattern) -> None:
        """Consume the rest of a text that is over, if it begins a match."""
        if self._is_end and self._begins(pattern):
            self.skip_all()

    def skip_all(self) -> None:
        """Consume the rest of the text."""
        self._at = len(self._text)

    def _begins(self, pattern: Pattern) -> bool:
        """Whether the rest of the text may begin a match."""
        return pattern.fullmatch(self._text, self._at, partial=True) is not None

    def until(self, pattern: Pattern, out: Out, last: Pattern | None = None, hides_cut: bool = False) -> Steps[Any]:
        """Pass text to `out` up to a match, which is consumed and returned; None at the end of the text.

        With `last`, text that is over is searched for that pattern. With `hides_cut`, the beginning of a match at which
        a limit has ended the text is not passed.
        """
        while True:
            if self._is_end:
                pattern = last or pattern
            is_partial = not self._is_end or (hides_cut and self.is_end_cut)
            match = pattern.search(self._text, self._at, partial=is_partial)
            start, self._at = self._at, len(self._text) if match is None else match.start()
            if self._at > start:
                out(self._text[start : self._at])
            if match is not None and not match.partial:
                self._at = match.end()
                return match
            if self._is_end:
                self.skip_all()
                return None
            yield

    def arguments(self, out: Out, may_end_text: bool = False) -> Steps[None]:
        """Pass a call's arguments to `out` as a JSON object, as they come; what is not meant as one becomes {}.

        `may_end_text`: whether the arguments are complete if their writer ends the text where no value has begun, or
        after a word.
        """
        begin = yield from self.match(VALUE_START)
        if begin is not None and begin[1] == "{":
            yield from self.json(out)
        elif begin is not None:
            encoded = list[str]()
            yield from self.json(encoded.append)
            if (text := _decoded("".join(encoded))) is not None:  # else it is cut
                out(object_in(text) or "{}")
        else:
            yield from self.json(len)  # not shown
            if not (self.is_cut if may_end_text else self.is_over):
                out("{}")

    def json(self, out: Out) -> Steps[None]:
        """Pass a JSON value to `out` as it comes; only what can be no JSON at its place is repaired."""
        yield from self.until(NOT_SPACE, len)
        depth = 0
        while (mark := (yield from self.until(JSON_INNER if depth else JSON_START, out))) is not None:
            if mark.group() == '"':
                yield from self._quoted(JSON, '"', out)
            elif mark.group() != ",":
                out(CONSTANTS.get(mark.group(), mark.group()))
                depth += DEPTHS.get(mark.group(), 0)
            if not depth:
                return

    def plain(self, patterns: ArgumentPatterns, parameter: Parameter, out: Out) -> Steps[None]:
        """Pass plain text, which a mark or the answer's end ends, to `out` as JSON; text that is cut stays open."""
        is_streamed, raw = parameter.is_text and not parameter.has_text_limits, list[str]()
        if is_streamed:
            out('"')
        write = (lambda text: out(dumped(text)[1:-1])) if is_streamed else raw.append
        mark = yield from self.until(patterns.close, write, patterns.last, hides_cut=True)
        if mark is not None or not self.is_cut:
            out('"' if is_streamed else json_of("".join(raw), parameter))

    def literal(self, patterns: ArgumentPatterns, parameter: Parameter, out: Out) -> Steps[None]:
        """Pass a literal to `out` as JSON; a text is read as another type if the parameter takes no texts."""
        raw = list[str]()
        write = out if parameter.may_be_text else raw.append
        marks = _Marks(write)
        while (part := (yield from self._token(patterns.inner if marks.depth else patterns.value))) is not None:
            is_key = marks.before(part["mark"])
            if (quote := part["quote"]) is not None:
                yield from self._quoted(patterns, quote, write)
            elif (words := part["words"]) is not None:
                is_text = is_key or (parameter.is_text and not marks.depth)
                write(words if self.is_over and marks.depth else dumped(words) if is_text else _word(words))
            if not marks.depth:
                break
        if not self.is_over:  # a literal that is cut is left open
            marks.close()
        text = "".join(raw)
        out(json_of(json.loads(text), parameter) if text.startswith('"') and not self.is_over else text)

    def _token(self, pattern: Pattern) -> Steps[Any]:
        yield from self.until(NOT_SPACE, len)
        return (yield from self.match(pattern))

    def _quoted(self, patterns: ArgumentPatterns, quote: str, out: Out) -> Steps[None]:
        """Pass a text after its quotation mark to `out` as JSON, and the texts that Python would append to it."""
        out('"')
        close = patterns.quotes[quote]
        while True:
            if quote == '"':  # most texts are JSON: pass on at once what need not be changed
                start, self._at = self._at, JSON_TEXT.match(self._text, self._at).end()
                out(self._text[start : self._at])
            mark = yield from self.until(close, lambda text: out(dumped(text)[1:-1]), hides_cut=True)
            if mark is None:
                return
            if mark.group() not in patterns.quotes:
                out(_escape(mark.group()))
            elif (appended := (yield from self.match(patterns.quote))) is not None:
                quote = appended["quote"]
                close = patterns.quotes[quote]
            else:
                out('"')
                return


class _Marks:
    """Writes the brackets, commas and colons of a literal as JSON: also those that are missing, and none too many."""

    def __init__(self, write: Out):
        self._write = write
        self._closing = list[str]()  # of the open brackets
        self._num_open = dict.fromkeys(CLOSING.values(), 0)  # by what closes them
        self._last = ""  # what came last in the innermost ones: "key", ":", "value" or ","; empty if nothing did

    @property
    def depth(self) -> int:
        return len(self._closing)

    def before(self, mark: str | None) -> bool:
        """Write a mark, or what comes before a text or word; return whether that is an object's key."""
        if mark in CLOSING:
            if self._num_open[CLOSING[mark]]:
                self.close(CLOSING[mark])
        elif mark == ",":
            self._complete()
            self._last = self._last and ","
        elif mark == ":":
            if self._last == "key":
                self._write(": ")
                self._last = ":"
        else:
            return self._begin(mark)
        return False

    def _begin(self, bracket: str | None) -> bool:
        """Write what comes before a text or word, or an opening bracket; return whether a key is due."""
        is_key = self._closing[-1:] == ["}"] and self._last not in ("key", ":")
        if is_key and bracket is not None:
            return True  # which a bracket is not
        self._write({"key": ": ", "value": ", ", ",": ", "}.get(self._last, ""))
        self._last = "key" if is_key else "value"
        if bracket is not None:
            self._write("{" if bracket == "{" else "[")
            self._closing.append("}" if bracket == "{" else "]")
            self._num_open[self._closing[-1]] += 1
            self._last = ""
        return is_key

    def _complete(self) -> None:
        """Write what a key's value lacks."""
        missing = {"key": ": null", ":": "null"}.get(self._last)
        if missing is not None:
            self._write(missing)
            self._last = "value"

    def close(self, down_to: str | None = None) -> None:
        """End the literal, or only close brackets up to the innermost that ends with `down_to`."""
        if not self._last and not self._closing:  # no value at all
            self._write("null")
        bracket = None
        while self._closing and bracket != (down_to or ""):
            self._complete()
            self._write(bracket := self._closing.pop())
            self._num_open[bracket] -= 1
            self._last = "value"


def _decoded(text: str) -> str | None:
    """Return the text that a JSON string is; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def object_in(text: str) -> str | None:
    """Return the JSON of an object that is written with mistakes, or as a text; None if it is cut, or none."""
    reader, parts = TextReader(), list[str]()
    reader.add(text)
    reader.end()
    if VALUE_START.match(text) is None:
        return None
    for _ in reader.arguments(parts.append):
        pass
    try:
        json.loads("".join(parts))
    except (ValueError, RecursionError):
        return None
    return "".join(parts)


def _word(word: str) -> str:
    """Return a literal's words as JSON: a number, a constant, or a text without quotation marks."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    return word if NUMBER.fullmatch(word) or word in CONSTANTS.values() else dumped(word)


def _escape(escape: str) -> str:
    """Return an escape as JSON; one that JSON has not is read as Python's."""
    if JSON_ESCAPE.fullmatch(escape):
        return escape
    try:
        return json.dumps(ast.literal_eval(f'"{escape}"'))[1:-1]
    except (SyntaxError, ValueError):
        return dumped(escape)[1:-1]
