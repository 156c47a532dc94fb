"""Patterns that read a format of tool calls, made from its description."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import regex

from lp_runtime.chat.formats import NO_CALLS, CallFormat, ParameterStyle

Pattern = Any  # the package regex has no type hints

PLACEHOLDERS = {
    "$NAME": r"(?P<name>[\w.:/-]+?)",
    "$INDEX": r"(?P<index>\d+)",
    "$ID": r"(?P<id>[\w.:-]+?)",
    "$KEY": r"(?P<key>[^<>\"]+?)",
    "$STRING": r"(?P<string>true|false)",
}
WORD = r"""[^\s"'<>=:,(){}\[\]]+"""
WORDS = f"{WORD}(?: +{WORD})*"
ESCAPE = r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])"
PART = r"<[^>]*>|[^<\s]+"  # of a text: a mark, or what is between marks
NEVER = regex.compile(r"(?!)")


class CallPatterns(NamedTuple):
    """Patterns of a format's calls."""

    marks: Pattern  # what begins calls, anywhere in an answer
    loose_marks: Pattern  # the same, and the format's loose marks
    bare: Pattern | None  # what begins an answer whose calls have no mark; None if they have one
    heads: dict[str, Pattern]  # what comes between a mark and the first call's arguments, or its JSON object
    following: Pattern | None  # what comes before the next call's, perhaps without a mark; None if it needs one
    tail: list[Pattern]  # what comes after a call's arguments; one must, if they are not one JSON object
    end: list[Pattern]  # what may come after the last call


class ArgumentPatterns(NamedTuple):
    """Patterns of arguments that are not one JSON object."""

    key: Pattern  # what comes before a value
    close: Pattern | None  # what ends a plain value; None if values are literals
    last: Pattern | None  # the same in a text that is over
    value: Pattern  # the first token of a literal
    inner: Pattern  # a token inside the brackets of a literal
    quote: Pattern  # the quotation mark of a text that continues the one before
    quotes: dict[str, Pattern]  # what ends a text in a literal, or is an escape in it, by its quotation mark


# Texts of JSON. Other backslashes than these are characters of the text, such as those of a path.
TEXTS = {'"': regex.compile(r"""\"|\\(?:["\\/bfnrt']|u[0-9a-fA-F]{4})""")}
JSON = ArgumentPatterns(key=NEVER, close=None, last=None, value=NEVER, inner=NEVER, quote=NEVER, quotes=TEXTS)


@functools.cache
def call_patterns(form: CallFormat) -> CallPatterns:
    if form is NO_CALLS:
        return CallPatterns(NEVER, NEVER, bare=None, heads={}, following=None, tail=[], end=[])
    marks = marks_of(form)
    between = r"[\s,;]*" if form.is_list else r"\s*"
    following = between + head_of(form, form.head) if form.is_list else r"[\s,;]*(?=\{)"
    before_tail = r"[\s}\]]*" if form.is_object else r"[\s,]*" if form.style and form.style.separator else r"\s*"
    return CallPatterns(
        marks=regex.compile(any_of(marks)),
        loose_marks=regex.compile(any_of([*marks, *(mark for mark, _ in form.loose if mark)])) if marks else NEVER,
        bare=None if form.mark else regex.compile(rf"(?=\s*{regex.escape((form.begin + form.call)[0])})"),
        heads={mark: regex.compile(first_head(form, mark)) for mark in ("", *marks)},
        following=regex.compile(following) if form.is_list or form.is_object else None,
        tail=mark_patterns(before_tail, form.tail),
        end=[*mark_patterns(between, form.end + "".join(end for _, end in form.also)), regex.compile(between)],
    )


def marks_of(form: CallFormat) -> list[str]:
    return list(filter(None, (form.mark, *(mark for mark, _ in form.also))))


def first_head(form: CallFormat, mark: str) -> str:
    """Return the pattern of what comes between a mark and the first call's arguments, or its object."""
    if form.is_object:
        return r"[\s\[]*" + head_of(form, "")
    text = form.begin + form.head
    known = mark if mark in text else form.mark
    return r"\s*" + head_of(form, text.partition(known)[2] if known else text)


def head_of(form: CallFormat, text: str) -> str:
    """Return the pattern of a head: a text of the description, and then the arguments or an object, which it leaves.

    It accepts white space next to marks. The prefix of a name may be missing, and the arguments or what is before them.
    """
    if form.is_object:
        return lenient(text) + r"\s*(?=\{)"
    text = regex.sub(r"(?<=[>\]])(?=[\w$])|(?<=[\w$])(?=[<\[])", " ", text)
    before, prefix, name = regex.fullmatch(r"(.*?)(\w+[.:])?(\$NAME.*)", text, regex.DOTALL).groups()
    head = lenient(before) + (rf"(?P<prefix>{regex.escape(prefix)})?" if prefix else "")
    if form.style is not None:
        return head + lenient(name) + (r"\s*(?=<)" if form.style.close else "")
    number, between = regex.fullmatch(r"\$NAME(.*\$[A-Z]+)?(.*)", name, regex.DOTALL).groups(default="")
    ends = regex.findall(PART, form.tail)
    after, last = (any_of(ends), any_of(ends[-1:])) if ends else [rf"\Z|{any_of(marks_of(form))}"] * 2
    value = rf"{lenient(between)}\s*(?=(?P<value>[{{\"]|null)|{after})"
    # An object may follow the name at once, but an index would be taken for a part of the name.
    unmarked = NEVER.pattern if "$INDEX" in number else rf"(?:{lenient(between)})?\s*(?=(?P<object>\{{))"
    return head + lenient("$NAME") + rf"(?:{lenient(number)}(?:{value}|\s*(?={last}))|{unmarked})"


@functools.cache
def argument_patterns(form: CallFormat, style: ParameterStyle) -> ArgumentPatterns:
    """Return the patterns of a format's arguments; `style` is that of the format, which must have one."""
    quotes = [quote for quote in ('"', style.quote) if quote]
    quote = f"(?:{any_of(quotes)})?"
    key = rf"[\s,]*{quote}(?P<key>{WORDS}){quote}\s*{regex.escape(style.open.removeprefix('$KEY'))}"
    close = last = None
    if style.close:
        # The line breaks of a description are not part of the value; others are.
        line_break = "\n?" if style.open.endswith("\n") else ""
        key = r"\s*" + lenient(style.open.rstrip("\n")) + line_break
        ends = [line_break + regex.escape(style.close.strip("\n")), *_ends(form, style)]
        close, last = regex.compile("|".join(ends)), regex.compile("|".join([*ends, *_last_ends(form)]))
    token = rf"\s*(?:(?P<quote>{any_of(quotes)})|(?P<words>{WORDS}) *|(?P<mark>"
    return ArgumentPatterns(
        key=regex.compile(key),
        close=close,
        last=last,
        value=regex.compile(token + r"[\[{(]))"),
        inner=regex.compile(token + r"[\[{()}\],:]))"),
        quote=regex.compile(rf"\s*(?P<quote>{any_of(quotes)})"),
        quotes={quote: regex.compile(regex.escape(quote) + ESCAPE * (len(quote) == 1), regex.S) for quote in quotes},
    )


def _ends(form: CallFormat, style: ParameterStyle) -> list[str]:
    """Return the patterns of what ends a value whose closing mark is missing: a line of the next key, or the tail.

    One mark of the tail may be text of the value: it must be followed by the next mark of the tail, another call, or
    the end of the calls. Of several, the last is enough if another call follows.
    """
    key = lenient(style.open.rstrip("\n")) + "\n" * style.open.endswith("\n")
    tail = [each.pattern for each in mark_patterns("", form.tail)]
    next_call = any_of([form.call.partition("$")[0], form.end] if form.is_list else [form.mark])
    ends = [rf"{tail[-1]}\s*(?:{next_call})", *([r"\s*".join(tail)] if tail[1:] else [])]
    return [rf"(?=\n{key})", *(rf"\n?(?={each})" for each in ends)]


def _last_ends(form: CallFormat) -> list[str]:
    """Return the patterns of what ends a value at the end of a text: one mark of the tail, without the others."""
    return [rf"\n?(?={each.pattern}\s*\Z)" for each in mark_patterns("", form.tail)]


def lenient(text: str) -> str:
    """Return the pattern of a description's text, which accepts any white space where the text has some."""
    parts = regex.split(r"(\s+|\$[A-Z]+)", text)
    known = {part: r"\s*" if part.isspace() else regex.escape(part) for part in parts}
    return "".join(PLACEHOLDERS.get(part, known[part]) for part in parts)


def mark_patterns(before: str, text: str) -> list[Pattern]:
    """Return the patterns of the marks in a text, each after `before`."""
    return [regex.compile(before + regex.escape(piece)) for piece in regex.findall(PART, text)]


def any_of(texts: Iterable[str]) -> str:
    """Return the pattern of any of some texts, which without texts matches nothing."""
    return "|".join(map(regex.escape, sorted(texts, key=len, reverse=True))) or NEVER.pattern
