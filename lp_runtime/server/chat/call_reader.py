"""Reads a call of a tool, a JSON object with a name and arguments, in a text that comes piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from lp_runtime.server.chat.json_scanner import JsonScanner

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "type", "id")  # that a call may begin with; of other objects no call is made
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
MAX_HEAD_CHARS = 4096  # of a call, without its arguments, in which its name must stand


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, whose keys come in any order, and of which others are skipped.

    Attributes:
        name: the tool's name; None before it is known that the text is a call.
        is_done: whether the call has ended.
        is_refused: whether the text is no call.
        text: all that has been read so far, for a text that is no call.
        rest: what stands behind a call that has ended.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_refused = False
        self.text = self.rest = ""
        self._buffer = ""  # what is not read yet
        self._read: Callable[[], bool] = self._read_brace
        self._named: str | None = None  # the name, which may come before or behind the arguments
        self._arguments = ""  # that have come before the name
        self._num_argument_chars = 0
        self._has_arguments = False
        self._key = ""
        self._scanner = JsonScanner()  # of the value that is being read

    def add(self, text: str) -> str:
        """Read on; return the arguments, or a part of them, that are known now to be a call's."""
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
        """Whether it is known that this is a call."""
        return self._named is not None and self._has_arguments

    # Each of these reads one part of the buffer, if it is there, and returns whether the next one has work.

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
        self._buffer = stripped.removeprefix("}")  # a call may lack it
        return self._refuse_if(True)

    def _take_mark(self, stripped: str, mark: str, read: Callable[[], bool]) -> bool:
        """Whether a text begins with a mark; what stands behind it is read next."""
        if stripped.startswith(mark):
            self._buffer, self._read = stripped[1:], read
            return True
        return False

    def _refuse_if(self, is_other: object) -> bool:
        """Note that the text is no call, if it is not; one that is known already ends where it cannot be read on."""
        if is_other:
            self.is_done, self.is_refused, self.rest = self._is_begun, not self._is_begun, self._buffer
        return False


def _unescaped(text: str) -> str:
    """Return what a JSON string says; models write escapes that JSON does not have, such as those of Markdown."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return re.sub(r"\\(.)", r"\1", text)
