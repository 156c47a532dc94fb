"""Regular expressions, rewritten so that xgrammar reads what their writers mean.

Every part of an expression that matches one character becomes a character or a class of ranges, limited to the
characters that are allowed. docs/decisions/constraints.md lists what xgrammar 0.2.8 reads otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lp_runtime.constraints.regex_anchors import Group, fixed_beginning, parsed, split, without_anchors
from lp_runtime.constraints.regex_syntax import TOKEN, quoting

Ranges = Sequence[tuple[int, int]]  # of code points: first and last of each
MAX_CODE_POINT = 0x10FFFF
UNICODE: Ranges = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))  # the characters that UTF-8 can encode
UNESCAPED_IN_JSON: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, MAX_CODE_POINT))
# Code points of one and two bytes in UTF-8, of three, and of four.
LENGTHS: Ranges = ((0, 0x7FF), (0x800, 0xFFFF), (0x10000, MAX_CODE_POINT))

SYNTAX = "()|*+?{}"
UNREPEATED = ("", "(", "*", "+", "?", "}")  # after these ? is no repetition
NAMED = {"\0": r"\0", "\t": r"\t", "\n": r"\n", "\v": r"\v", "\f": r"\f", "\r": r"\r"}
CHARACTERS = {escape: character for character, escape in NAMED.items()}
SPECIAL = r"\^$.*+?()[]{}|/"
SPECIAL_IN_CLASS = r"\[]^-"
CARET = ord("^")
NOTHING = f"[^\\0-{chr(MAX_CODE_POINT)}]"
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Whitespace of both ECMAScript and Python, and of either.
SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
ANY_SPACE: Ranges = (*SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))


def exact_regex(pattern: str, allowed: Ranges = UNICODE, free: str = "") -> str:
    """Rewrite a regular expression of ECMAScript's or Python's syntax for xgrammar's `Grammar.from_regex`.

    It then matches only texts of allowed characters. `free` matches the text around a match, where no anchor excludes
    one. Raises ValueError, which quotes the expression, for what is not valid or not supported.
    """
    return _rewritten(pattern, allowed, _in_grammar, free)


def automaton_regex(pattern: str, free: str = "") -> str:
    """Rewrite a regular expression for a pattern in xgrammar's JSON schemas, otherwise as `exact_regex`.

    The result becomes an automaton if it is ASCII. It matches only strings that JSON holds without escapes.
    """
    return _rewritten(pattern, UNESCAPED_IN_JSON, _in_automaton, free)


def _rewritten(pattern: str, allowed: Ranges, write: Callable[[Ranges], str], free: str) -> str:
    """Rewrite a regular expression; `write` returns an expression of one character in any of the ranges."""
    tokens, written, before = split(without_anchors(pattern, free)), list[str](), ""
    with quoting(pattern):
        for token in tokens:
            if token in SYNTAX:
                # In automata, (ab+)? matches b, too.
                written.append("{0,1}" if token == "?" and before not in UNREPEATED else token)
            elif (ranges := _characters(token)) is None:
                raise ValueError(f"{token} is not supported")
            else:
                written.append(write(intersection(ranges, allowed)))
            before = token
    return "".join(written)


def may_match_one_text(pattern: str, other: str) -> bool:
    """Whether searches for two expressions may find the same text; false only if the beginnings of theirs differ."""
    pairs = zip(map(_possible, fixed_beginning(pattern)), map(_possible, fixed_beginning(other)), strict=False)
    return all(one == two or intersection(one, two) for one, two in pairs)


def regex_may_begin_with_space(pattern: str) -> bool:
    """Whether a text that an expression matches may begin with white space; raises as `without_anchors`."""
    return _beginning(parsed(without_anchors(pattern)))[0]


def _beginning(group: Group) -> tuple[bool, bool]:
    """Return whether a text of a group may begin with white space, and whether it may be empty."""
    has_space = may_be_empty = False
    for items in group.alternatives:
        place, is_open = 0, True  # is_open: whether all items so far may be empty
        while place < len(items) and is_open:
            item, place = items[place], place + 1
            if isinstance(item, Group):
                has_one, is_open = _beginning(item)
            else:
                has_one, is_open = bool(intersection(_possible(item), ANY_SPACE)), False
            has_space |= has_one
            is_open |= items[place : place + 1] in (["*"], ["?"]) or items[place : place + 2] == ["{", "0"]
            if items[place : place + 1] == ["{"]:
                place = items.index("}", place) + 1
            while items[place : place + 1] in (["*"], ["+"], ["?"]):
                place += 1
        may_be_empty |= is_open
    return has_space, may_be_empty


def _characters(token: str) -> Ranges | None:
    """Return the characters that a class, character or escape matches; None for an escape of no character."""
    first, *others = TOKEN.finditer(token)
    return _class(others[:-1]) if token[0] == "[" else _ranges(first)


def _possible(token: str) -> Ranges:
    """Return the characters that a class, character, escape or `$` may match."""
    ranges = () if token == "$" else _characters(token)
    return UNICODE if ranges is None else ranges


def complement(ranges: Ranges) -> Ranges:
    gaps, start = [], 0
    for first, last in sorted(ranges):
        if first > start:
            gaps.append((start, first - 1))
        start = max(start, last + 1)
    return [*gaps, (start, MAX_CODE_POINT)] if start <= MAX_CODE_POINT else gaps


def intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement([*complement(one), *complement(other)])


def _class(items: list[re.Match[str]]) -> Ranges:
    """Return the characters of a class, given what its brackets hold."""
    is_negated = bool(items) and items[0][0] == "^"
    items = items[is_negated:]
    if not items:
        raise ValueError("an empty character class is not supported")
    members: list[tuple[int, int]] = []
    is_wide = is_negated or {r"\s", r"\S"} <= {each[0] for each in items}
    while items:
        item = items.pop(0)
        ranges = _class_item(item, is_wide)
        if len(items) > 1 and items[0][0] == "-":
            last = _class_item(items[1], is_wide)
            if not ranges[0][0] == ranges[-1][1] <= last[0][0] == last[-1][1]:
                raise ValueError(f"the range {item[0]}-{items[1][0]} of a character class is not valid")
            ranges = [(ranges[0][0], last[0][0])]
            del items[:2]
        members += ranges
    return complement(members) if is_negated else members


def _class_item(token: re.Match[str], is_wide: bool) -> Ranges:
    if token[0] in (".", r"\b"):
        return [(0x2E, 0x2E)] if token[0] == "." else [(0x08, 0x08)]
    if (ranges := _ranges(token, is_wide)) is None:
        raise ValueError(f"{token[0]} is not supported in a character class")
    return ranges


def _ranges(token: re.Match[str], is_wide: bool = False) -> Ranges | None:
    """Return the characters that a token matches; None for an escape of no character, such as a border.

    `is_wide`: whether whitespace of one language only counts, as it must where the characters are excluded.
    """
    text = token[0]
    space, other = (ANY_SPACE, SPACE) if is_wide else (SPACE, ANY_SPACE)
    sets = {r"\d": DIGIT, r"\w": WORD, r"\s": space, r"\D": complement(DIGIT), r"\W": complement(WORD)}
    sets |= {r"\S": complement(other), ".": complement(LINE_END)}
    if text in sets:
        return sets[text]
    if token["high"]:
        number = 0x10000 + (int(token["high"], 16) - 0xD800 << 10) + int(token["low"], 16) - 0xDC00
    elif digits := token["two"] or token["four"] or token["any"]:
        number = int(digits, 16)
    elif token["control"]:
        number = ord(token["control"]) % 32
    elif text in CHARACTERS:
        number = ord(CHARACTERS[text])
    elif len(text) > 1 and text.isascii() and text[-1].isalnum():
        return None
    else:
        number = ord(text[-1])
    return [(number, number)]


def _in_grammar(ranges: Ranges) -> str:
    return _written(ranges, lambda character: character)


def _in_automaton(ranges: Ranges) -> str:
    """Write characters in ASCII, a class for each length in UTF-8: else automata allow invalid bytes."""
    parts = [part for length in LENGTHS if (part := intersection(ranges, [length]))] or [ranges]
    written = [_written(part, lambda character: f"\\u{{{ord(character):x}}}") for part in parts]
    return written[0] if len(written) == 1 else f"(?:{'|'.join(written)})"


def _written(ranges: Ranges, escape: Callable[[str], str]) -> str:
    """Return an expression of one character; `escape` writes characters outside printable ASCII."""
    if not ranges:
        return NOTHING

    def quoted(number: int, special: str) -> str:
        character = chr(number)
        if character in NAMED:
            return NAMED[character]
        if not (character.isascii() and character.isprintable()):
            return escape(character)
        return "\\" + character if character in special else character

    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return quoted(ranges[0][0], SPECIAL)
    if ranges[0][0] == CARET:  # xgrammar takes [\^ for [^
        rest = [(CARET + 1, ranges[0][1])] if ranges[0][1] > CARET else []
        ranges = [*rest, *ranges[1:], (CARET, CARET)]
    pairs = [[quoted(each, SPECIAL_IN_CLASS) for each in dict.fromkeys(pair)] for pair in ranges]
    return f"[{''.join(map('-'.join, pairs))}]"
