"""Syntax of regular expressions: Python's additions are written as ECMAScript's, what xgrammar lacks is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

TOKEN = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4})|u\{(?P<any>[0-9a-fA-F]{1,6})\}|c(?P<control>[A-Za-z]))"
    r"|\\?.",
    re.DOTALL,
)
PART = re.compile(
    r"\[(?:\\.|[^\\\]])*\]"  # a character class
    r"|(?P<open>\((?:\?:|(?P<name>\?P?<[^\W\d]\w*>)|(?P<extension>\?.{0,2}))?)"
    r"|(?P<repetition>(?:[*+?]|\{(?:(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?|,(?P<limit>[0-9]*))\})\??)"
    rf"|(?:{TOKEN.pattern})",
    re.DOTALL,
)
EXTENSIONS = {"?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind", "?>": "an atomic group"}
EXTENSIONS |= {"?P=": "a backreference", "?(": "a condition", "?#": "a comment"}
MAX_GROUPS = 100  # nested, so that recursion is bounded


@contextmanager
def quoting(pattern: str) -> Iterator[None]:
    """Append an expression, as its author wrote it, to the ValueErrors of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}: {pattern[:100]!r}") from error


def plain_syntax(pattern: str) -> str:
    """Return an expression without names of groups, unescaped literal braces and `{,n}`.

    Raises ValueError for other extensions of groups, and for a syntax that is not valid.
    """
    depth, before, written = 0, None, list[str]()
    with quoting(pattern):
        for part in PART.finditer(pattern):
            depth += bool(part["open"]) - (part[0] == ")")
            if depth < 0:
                raise ValueError("a closing parenthesis has no opening one")
            if depth >= MAX_GROUPS:
                raise ValueError(f"more than {MAX_GROUPS} nested groups")
            if part["repetition"]:
                _check_repetition(part, before)
            written.append(_plain(part))
            before = part
        if depth:
            raise ValueError("a parenthesis is not closed")
    return "".join(written)


def _check_repetition(part: re.Match[str], before: re.Match[str] | None) -> None:
    if before is None or before["open"] or before[0] == "|":
        raise ValueError(f"{part[0]} has nothing to repeat")
    if before["repetition"]:
        raise ValueError(f"{before[0]}{part[0]} is not supported, a repetition of a repetition")
    if part["most"] and int(part["most"]) < int(part["least"]):
        raise ValueError(f"the limits of {part[0]} are not in order")


def _plain(part: re.Match[str]) -> str:
    text = part[0]
    if extension := part["extension"]:
        name = next((name for begin, name in EXTENSIONS.items() if extension.startswith(begin)), text)
        raise ValueError(f"{name} is not supported")
    if text == "[":
        raise ValueError("a character class is not closed")
    if text == "\\":
        raise ValueError("a backslash ends the expression")
    if part["name"]:
        return "("
    if part["limit"] is not None:
        return "{0" + text[1:]
    return "\\" + text if text in "{}" else text
