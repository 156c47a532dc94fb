"""Finds where a JSON value ends in a text that comes piece by piece."""

from __future__ import annotations


class JsonScanner:
    """Reads a JSON value; what stands behind its end is not read."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = self._has_begun = False
        self.is_done = False

    def add(self, text: str) -> int:
        """Read on; return how many characters of the text belong to the value, and set `is_done` at its end."""
        for place, character in enumerate(text):
            if self._in_string:
                self._read_in_string(character)
            elif character == '"':
                self._in_string = self._has_begun = True
            elif character in "{[":
                self._depth += 1
                self._has_begun = True
            elif character in "}]":
                if not self._depth:  # the end of what the value stands in
                    self.is_done = True
                    return place
                self._depth -= 1
            elif not self._depth and self._has_begun and character in ", \n\t;":  # behind a number or a word
                self.is_done = True
                return place
            else:
                self._has_begun |= not character.isspace()
                continue
            if not self._depth and not self._in_string and self._has_begun:
                self.is_done = True
                return place + 1
        return len(text)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
