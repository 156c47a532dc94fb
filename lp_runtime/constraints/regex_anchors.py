"""Anchors of regular expressions, rewritten for xgrammar, which ignores them and matches whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lp_runtime.constraints.regex_syntax import TOKEN, plain_syntax

START, END = 0, -1  # of a sequence of items
ANCHORS = {START: ("^", r"\A"), END: ("$", r"\Z", r"\z")}
REPETITIONS = ("*", "+", "?", "{")


@dataclass
class Group:
    """Alternatives in parentheses; a whole expression is one without them."""

    begin: str
    alternatives: list[list[Item]]
    end: str = ""

    def text(self) -> str:
        written = ("".join(each if isinstance(each, str) else each.text() for each in one) for one in self.alternatives)
        return self.begin + "|".join(written) + self.end


Item = str | Group  # a character, a class, an anchor or a token of a repetition


def without_anchors(pattern: str, free: str = "") -> str:
    """Return an expression without anchors, whose whole texts are those that `pattern` matches.

    `free` matches the text before or after a match, where no anchor excludes one. The result has `plain_syntax`.
    Raises ValueError for an anchor inside an expression, and as `plain_syntax`.
    """
    whole = parsed(pattern)
    if free:
        whole = Group("", [[Group("(?:", whole.alternatives, ")")]])
    for side in (START, END):
        _open(whole, side, free)
    text = whole.text()
    for token in split(text):
        if token in (*ANCHORS[START], *ANCHORS[END]):
            raise ValueError(f"{token} is supported only where a text begins or ends: {pattern[:100]!r}")
    return text


def fixed_beginning(pattern: str) -> list[str]:
    """Return the characters, classes and last `$` with which each text begins that a search for `pattern` finds."""
    whole = parsed(pattern)
    if len(whole.alternatives) > 1 or _outer(whole.alternatives[0], START) not in ANCHORS[START]:
        return []
    items, fixed = whole.alternatives[0][1:], list[str]()
    for item, following in zip(items, [*items[1:], ""], strict=True):
        if not isinstance(item, str) or item in (*REPETITIONS, *ANCHORS[START]) or following in ("*", "?", "{"):
            break
        fixed.append("$" if item in ANCHORS[END] else item)
    return fixed


def _open(group: Group, side: int, free: str) -> None:
    """Remove the anchors at a side of each alternative; add the free text, once, to those that have none."""
    closed, others = list[list[Item]](), list[list[Item]]()
    for items in group.alternatives:
        outer = _outer(items, side)
        if isinstance(outer, Group) and _is_anchored(outer, side):
            _open(outer, side, free)
            closed.append(items)
        elif outer in ANCHORS[side]:
            while _outer(items, side) in ANCHORS[side]:
                items.pop(side)
            closed.append(items)
        else:
            others.append(items)
    if free and others:
        opened: list[Item] = [Group("(?:", others, ")")]
        opened.insert(0 if side == START else 1, free)
        group.alternatives = [*closed, opened]


def _outer(items: Sequence[Item], side: int) -> Item | None:
    """Return the item at a side; None if there is none, or if it is repeated."""
    is_repeated = side == START and len(items) > 1 and items[1] in REPETITIONS
    return items[side] if items and not is_repeated else None


def _is_anchored(group: Group, side: int) -> bool:
    """Whether an alternative of a group has an anchor at a side."""
    outers = [_outer(items, side) for items in group.alternatives]
    return any(_is_anchored(each, side) if isinstance(each, Group) else each in ANCHORS[side] for each in outers)


def split(pattern: str) -> list[str]:
    """Split an expression into characters and classes."""
    tokens, is_class = list[str](), False
    for match in TOKEN.finditer(pattern):
        token = match[0]
        if is_class:
            tokens[-1] += token
            is_class = token != "]"
        else:
            tokens.append(token)
            is_class = token == "["
    return tokens


def parsed(pattern: str) -> Group:
    """Return the groups of an expression."""
    groups, tokens, place = [Group("", [[]])], split(plain_syntax(pattern)), 0
    while place < len(tokens):
        token, place = tokens[place], place + 1
        if token == "(":
            start, place = place, place + 2 * (tokens[place] == "?")
            group = Group("(" + "".join(tokens[start:place]), [[]])
            groups[-1].alternatives[-1].append(group)
            groups.append(group)
        elif token == ")":
            groups.pop().end = ")"
        elif token == "|":
            groups[-1].alternatives.append([])
        else:
            groups[-1].alternatives[-1].append(token)
    return groups[0]
