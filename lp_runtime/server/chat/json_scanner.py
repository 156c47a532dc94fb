"""Incremental search for the end of a JSON value in streamed text."""

from __future__ import annotations


class JsonScanner:
    """Scanner of one JSON value, which stops at its end.

    `has_begun` is set by the value's first character, not by whitespace before it.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.has_begun = self.is_done = False

    def add(self, text: str) -> int:
        """Read more text; return how many of its characters belong to the value, and set `is_done` at its end."""
        for place, character in enumerate(text):
            if self._in_string:
                self._read_in_string(character)
            elif not self._depth and self._ends_value(character):
                self.is_done = True
                return place
            else:
                self._read(character)
            # A string, object or array ends with this character; a number or word, only before the next one.
            if not self._depth and not self._in_string and character in '"}]':
                self.is_done = True
                return place + 1
        return len(text)

    def _ends_value(self, character: str) -> bool:
        """Whether a top-level character comes after the value, and so ends it."""
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
