"""Streaming parser that splits a chat answer into reasoning, text and tool calls."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from lp_runtime.chat.call_reader import OPEN, CallReader, NotACallError
from lp_runtime.chat.formats import CallFormat, ReasoningFormat
from lp_runtime.chat.patterns import NEVER, Pattern, any_of, call_patterns
from lp_runtime.chat.pieces import ChatParser, NewPieces, Piece, new_call_id
from lp_runtime.chat.text_reader import SPACE, Steps, TextReader
from lp_runtime.text.harmony import ANALYSIS, MESSAGE, MESSAGE_START

CHARS_AT_ONCE = 4096  # that a parser reads: what turns out to be no call is read again
LOOSE_END = regex.compile(r"[\s\]}]*")
OBJECT_START = regex.compile(r"[\s,;\[]*(?=\{)")
START = f"{MESSAGE_START}assistant"
RECIPIENT = regex.compile(r"to=(functions\.)?([\w.-]+)")
TEXT_START, TEXT_END = regex.compile(regex.escape(MESSAGE)), regex.compile(r"<\|(?:end|call|return|start)\|>")


class AnswerParser(ChatParser):
    """Parser of an answer in a known format.

    Args:
        form: NO_CALLS if the answer is not searched for calls.
        is_thinking: whether the prompt has already opened the reasoning part.
        is_either: whether the answer, after its reasoning part, is either only calls or only text.
        schemas: JSON schema of each tool's arguments, by its name.
        is_strict: whether calls must have the format's own marks and all that it writes before arguments.
    """

    chars_at_once = CHARS_AT_ONCE

    def __init__(
        self,
        form: CallFormat,
        reasoning: ReasoningFormat | None = None,
        is_thinking: bool = False,
        is_either: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        is_strict: bool = False,
    ):
        self._form, self._patterns = form, call_patterns(form)
        self._schemas = schemas or {}
        is_exact = is_strict or is_either  # as constrained answers are
        self._known = frozenset[str]() if is_exact else self._schemas.keys()  # tools that loose calls may name
        self._reasoning, self._is_thinking = reasoning, is_thinking
        self._is_either = is_either
        self._loose = dict(form.loose) if self._known else {}
        self._marks = self._patterns.loose_marks if self._loose else self._patterns.marks
        self._text, self._pieces = TextReader(), NewPieces()
        self._reader = CallReader(form, self._text, self._pieces, self._schemas, self._known)
        self._steps = self._answer()

    def add(self, text: str) -> list[Piece]:
        for start in range(0, len(text), self.chars_at_once):
            self._text.add(text[start : start + self.chars_at_once])
            next(self._steps, None)
        return self._pieces.returned()

    def finish(self, is_cut: bool = False) -> list[Piece]:
        self._text.end(is_cut)
        next(self._steps, None)
        return self._pieces.returned()

    def _content(self, text: str) -> None:
        self._pieces.content(text)

    def _answer(self) -> Steps[None]:
        yield from self._think()
        around = () if self._reasoning is None else self._reasoning.content
        if around:
            yield from self._text.match(regex.compile(rf"\s*(?:{any_of(begin for begin, _ in around)})"))
        ends = [end for _, end in around]
        if (yield from self._begins_with_a_call()):
            yield from self._calls("")
        elif "" in self._loose:
            yield from self._loose_calls("")
        while (mark := (yield from self._text.until(self._marks_or(ends), self._content))) is not None:
            if mark.group() in self._loose:
                yield from self._loose_calls(mark.group())
            elif mark.group() not in ends:
                yield from self._calls(mark.group())

    def _marks_or(self, texts: Sequence[str]) -> Pattern:
        return regex.compile(f"{any_of(texts)}|{self._marks.pattern}") if texts else self._marks

    def _think(self) -> Steps[None]:
        if self._reasoning is None:
            return
        begun = yield from self._text.match(regex.compile(r"\s*" + regex.escape(self._reasoning.begin)))
        if begun is None and not self._is_thinking:
            return
        end = regex.escape(self._reasoning.end)
        marks, is_ended = regex.compile(f"(?P<end>{end})|{self._patterns.marks.pattern}"), False
        while not is_ended and (mark := (yield from self._text.until(marks, self._pieces.thought))) is not None:
            is_ended = mark["end"] is not None or (yield from self._drafts(mark.group(), regex.compile(end)))
        if self._reasoning.hides_space:
            yield from self._text.match(SPACE)

    def _drafts(self, mark: str, end: Pattern) -> Steps[bool]:
        """Hold calls in reasoning back: they count if the answer ends with them. Return whether the reasoning ends."""
        draft, held, pieces = _DraftParser(self._form, schemas=self._schemas), list[str](), list[Piece]()

        def hold(text: str) -> None:
            held.append(text)
            pieces.extend(draft.add(text))

        if not (yield from self._may_begin_calls(mark)):
            self._pieces.thought(mark)
            return False
        try:
            hold(mark)
            if (yield from self._text.until(end, hold)) is not None:
                pieces = [Piece("reasoning", "".join(held))]
            else:
                pieces.extend(draft.finish(self._text.is_cut))
        except NotACallError:
            whole = "".join(held)
            num_read = len(whole) - draft.num_unread
            self._pieces.thought(whole[:num_read])
            self._text.put_back(whole[num_read:])
            return False
        self._pieces.extend(pieces)
        return True

    def _may_begin_calls(self, mark: str) -> Steps[bool]:
        """Return whether what follows a mark may be a call; consume nothing."""
        text = self._text
        text.keep()
        head = yield from text.match(self._patterns.heads[mark])
        may_begin = head is not None and not (self._form.is_object and (yield from text.match(OPEN)) is None)
        text.rewind()
        return may_begin

    def _begins_with_a_call(self) -> Steps[bool]:
        """Return whether the rest may be a call without a mark; if it must be text, look for no more marks."""
        bare = self._patterns.bare
        if bare is not None and (yield from self._text.match(bare)) is not None:
            return True
        begin = regex.compile(rf"(?=\s*(?:{self._marks.pattern}))")
        if self._is_either and (yield from self._text.match(begin)) is None:
            self._marks = NEVER
        return False

    def _calls(self, mark: str) -> Steps[None]:
        """Read the calls that follow a mark; what is not a call is text, as the mark is without one."""
        patterns, num_before = self._patterns, self._pieces.num_calls
        head, is_marked = patterns.heads[mark], bool(mark)
        while head is not None:
            self._text.keep()
            try:
                is_known = head is patterns.following and not self._form.is_list
                yield from self._reader.read(head, bool(mark), is_known)
            except NotACallError:
                if is_marked and (self._text.is_cut or self._text.is_cut_in_match):
                    self._text.skip_all()  # the head of a call
                    return
                self._text.rewind()
                break
            head, is_marked = patterns.following, self._form.is_list
        if self._pieces.num_calls > num_before:
            yield from self._text.match_all(patterns.end)
            return
        if mark:
            self._content(mark)
        if self._is_either:
            self._marks = NEVER

    def _loose_calls(self, mark: str) -> Steps[None]:
        """Read the calls of known tools that follow a loose mark; what is not a call is text, as the mark is."""
        num_before = self._pieces.num_calls
        while True:
            self._text.keep()
            try:
                if (yield from self._text.match(OBJECT_START)) is None:
                    raise NotACallError
                yield from self._reader.object(is_known=True)
            except NotACallError:
                self._text.rewind()
                break
        if self._pieces.num_calls > num_before:
            yield from self._text.match_all([LOOSE_END, regex.compile(r"\s*" + regex.escape(self._loose[mark])), SPACE])
        elif mark:
            self._content(mark)


class _DraftParser(AnswerParser):
    """Parser of calls that raises NotACallError at a text next to them; `num_unread` characters are left from there."""

    chars_at_once = sys.maxsize  # so that `num_unread` counts all
    num_unread = 0

    def _content(self, text: str) -> None:
        if text.strip():
            is_mark = self._marks.fullmatch(text) is not None  # of no call; it counts as read
            self.num_unread = self._text.num_unread + (0 if is_mark else len(text))
            raise NotACallError


class HarmonyParser(AnswerParser):
    """Parser for harmony's channels: analysis is reasoning, a message to functions.NAME is a call."""

    def _answer(self) -> Steps[None]:
        head = list[str]()
        while (yield from self._text.until(TEXT_START, head.append)) is not None:
            header, recipient = "".join(head), RECIPIENT.search("".join(head))
            head.clear()
            is_call = recipient is not None and (recipient[1] is not None or recipient[2] in self._known)
            if is_call:
                self._pieces.begin_call(recipient[2], new_call_id())
                yield from self._text.arguments(self._pieces.arguments, may_end_text=True)
            shown = len if is_call else self._pieces.thought if ANALYSIS in header else self._content
            yield from self._text.until(TEXT_END, shown)
