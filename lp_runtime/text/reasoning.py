"""The reasoning part of an answer's text: where the content after it begins."""

from __future__ import annotations

from typing import NamedTuple

from lp_runtime.text import harmony


class Reasoning(NamedTuple):
    """The marks between which the reasoning part of a chat's answer lies."""

    # None if the prompt has begun the part; else an answer that does not begin with it has no such part. Empty if the
    # answer is messages of harmony: the content begins with the first that is content.
    begin: str | None
    end: str
    content_marks: tuple[str, ...] = ()  # one of them may begin the content, which follows it
    hides_space: bool = True  # whether white space after the part is not content

    def content_start(self, text: str, is_whole: bool = False) -> int | None:
        """Return where the content begins in the text of an answer; None if the text does not show it yet.

        In a whole answer, a mark that is cut is content.
        """
        if self.begin == "":
            return harmony.content_start(text)
        start = self._part_end(text)
        if start is None or (self.is_undecided(text) and not is_whole):
            return None
        rest = text[start:].lstrip()
        mark = next((mark for mark in self.content_marks if rest.startswith(mark)), "")
        if mark:
            return len(text) - len(rest) + len(mark)
        if not start or not self.hides_space:
            return start
        return len(text) - len(rest) if rest else None

    def is_undecided(self, text: str) -> bool:
        """Return whether the end of an answer's text may be content or the beginning of a mark."""
        start = None if self.begin == "" else self._part_end(text)
        if start is None:
            return False
        rest = text[start:].lstrip()
        marks = self.content_marks if start or not self.begin else (self.begin, *self.content_marks)
        return any(mark != rest and mark.startswith(rest) for mark in marks)

    def left_after(self, text: str) -> tuple[Reasoning | None, str]:
        """Return (marks, text) that find the content once the text goes on; marks are None once it has begun."""
        start = self.content_start(text)
        if start is not None:
            return None, text[start:]
        if self.begin == "" or self._part_end(text) is not None:
            return self, text
        return self._replace(begin=None), text[max(0, len(text) - len(self.end) + 1) :]  # inside the part

    def _part_end(self, text: str) -> int | None:
        """Return where the reasoning part ends: at 0 if it has not begun, None inside it."""
        if self.begin and not text.lstrip().startswith(self.begin):
            return 0
        place = text.find(self.end)
        return None if place < 0 else place + len(self.end)
