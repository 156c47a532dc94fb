"""Finds where a JSON value ends in a text that comes piece by piece."""

from __future__ import annotations


class JsonScanner:
    """Reads a JSON value; what stands behind its end is not read.

    Attributes:
        has_begun: whether a character of the value, not of the space before it, has been read.
        is_done: whether the value has ended.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.has_begun = self.is_done = False

    def add(self, text: str) -> int:
        """Read on; return how many characters of the text belong to the value, and set `is_done` at its end."""
        for place, character in enumerate(text):
            if self._in_string:
                self._read_in_string(character)
            elif not self._depth and self._is_behind(character):
                self.is_done = True
                return place
            else:
                self._read(character)
            # A number or a word ends with what follows it.
            if not self._depth and not self._in_string and character in '"}]':
                self.is_done = True
                return place + 1
        return len(text)

    def _is_behind(self, character: str) -> bool:
        """Whether a character outside of arrays and objects stands behind the value."""
        return character in "}]" or (self.has_begun and character in ", \n\t;")

    def _read(self, character: str) -> None:
        self.has_begun |= not character.isspace()
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
