"""Incremental reader of a tool call, a JSON object with a name and arguments, in streamed text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from lp_runtime.server.chat.json_scanner import JsonScanner

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "type", "id")  # keys before a call is recognized; an object with others is not a call
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
MAX_HEAD_CHARS = 4096  # of a call without its arguments; the name must come within them


class CallReader:
    """Reader of `{"name": ..., "arguments": {...}}`, with keys in any order; other keys are skipped.

    Attributes:
        name: the tool's name; None until the text is known to be a call.
        is_refused: whether the text is not a call.
        text: all text read until the call was recognized; the caller shows it if the text is not a call.
        rest: text after the end of the call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_refused = False
        self.text = self.rest = ""
        self._buffer = ""  # unread text
        self._read: Callable[[], bool] = self._read_brace
        self._named: str | None = None  # the name, which may come before or after the arguments
        self._arguments = ""  # arguments not returned yet, for example those before the name
        self._num_argument_chars = 0
        self._has_arguments = False
        self._key = ""
        self._scanner = JsonScanner()  # of the current value

    def add(self, text: str) -> str:
        """Read more text; return the new part of the arguments, empty until the text is known to be a call."""
        if self.name is None:
            self.text += text
        self._buffer += text
        while not (self.is_done or self.is_refused) and self._read():
            pass
        num_head = len(self._buffer) if self._is_begun else len(self.text) - self._num_argument_chars
        if num_head > MAX_HEAD_CHARS and not self.is_done:
            self._refuse_if(True)
        if not self._is_begun:
            return ""
        self.name = self._named
        arguments, self._arguments = self._arguments, ""
        return arguments

    @property
    def _is_begun(self) -> bool:
        """Whether this is known to be a call: its name and the start of its arguments have been read."""
        return self._named is not None and self._has_arguments

    # Each of these states reads one element from the buffer, if it is complete, and returns whether to read on.

    def _read_brace(self) -> bool:
        stripped = self._buffer.lstrip(" \t\r\n[,;")
        return self._take_mark(stripped, "{", self._read_key) or self._refuse_if(stripped)

    def _read_key(self) -> bool:
        stripped = self._buffer.lstrip()
        found = STRING.match(stripped)
        if found is None:
            begun = stripped[1:]
            is_known = self._is_begun or any(key.startswith(begun) for key in KEYS)
            return self._refuse_if(stripped and not (stripped[0] == '"' and is_known))
        self._key = found.group(1)
        if not self._is_begun and self._key not in KEYS:
            return self._refuse_if(True)
        self._buffer, self._read = stripped[found.end() :], self._read_colon
        return True

    def _read_colon(self) -> bool:
        is_name = self._key == "name" and self._named is None
        stripped = self._buffer.lstrip()
        self._scanner = JsonScanner()
        return self._take_mark(stripped, ":", self._read_name if is_name else self._read_value) or self._refuse_if(
            stripped
        )

    def _read_name(self) -> bool:
        stripped = self._buffer.lstrip()
        found = STRING.match(stripped)
        if found is None:
            return self._refuse_if(stripped and stripped[0] != '"')
        self._named = _unescaped(found.group(1))
        self._buffer, self._read = stripped[found.end() :], self._read_comma
        return True

    def _read_value(self) -> bool:
        if not self._scanner.has_begun:
            self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        num = self._scanner.add(self._buffer)
        if self._key in ARGUMENTS:
            self._has_arguments = True
            self._arguments += self._buffer[:num]
            self._num_argument_chars += num
        self._buffer = self._buffer[num:]
        if self._scanner.is_done:
            self._read = self._read_comma
        return self._scanner.is_done

    def _read_comma(self) -> bool:
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        if self._take_mark(stripped, ",", self._read_key):
            return True
        self._buffer = stripped.removeprefix("}")  # models sometimes omit the closing brace
        return self._refuse_if(True)

    def _take_mark(self, stripped: str, mark: str, read: Callable[[], bool]) -> bool:
        """Consume a mark if the text begins with it, and make `read` the next state; return whether it does."""
        if stripped.startswith(mark):
            self._buffer, self._read = stripped[1:], read
            return True
        return False

    def _refuse_if(self, is_other: object) -> bool:
        """Stop reading if `is_other`: a recognized call ends here, any other text is refused; return False."""
        if is_other:
            self.is_done = self._is_begun
            self.is_refused = not self._is_begun
            self.rest = self._buffer
        return False


def _unescaped(text: str) -> str:
    """Unescape a JSON string; models also write escapes that JSON does not have, such as Markdown's."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return re.sub(r"\\(.)", r"\1", text)
