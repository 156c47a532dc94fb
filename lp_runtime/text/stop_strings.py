"""Stop strings: where the text of new tokens first contains one of several strings."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError
from lp_runtime.text import harmony
from lp_runtime.text.decoding import REPLACEMENT, Decoding
from lp_runtime.text.detokenizer import Detokenizer
from lp_runtime.text.token_text import TokenTexts


class Reasoning(NamedTuple):
    """The marks between which the reasoning part of a chat's answer lies."""

    # None if the prompt has begun the part; else an answer that does not begin with it has no such part. Empty if the
    # answer is messages of harmony: the content begins with the first that is content.
    begin: str | None
    end: str
    content_marks: tuple[str, ...] = ()  # one of them may begin the content, which follows it

    def is_undecided(self, text: str) -> bool:
        """Return whether it is undecided where an answer's content begins: white space, then a part of a mark."""
        return bool(self.begin) and self._is_cut_mark(text.lstrip(), (self.begin or "", *self.content_marks))

    def content_start(self, text: str) -> int | None:
        """Return where the answer's content begins in its text; None as long as it has not begun."""
        if self.begin == "":
            return harmony.content_start(text)
        stripped = text.lstrip()
        if self.begin and not stripped.startswith(self.begin):
            return None if self.is_undecided(text) else self._after_mark(text, 0)
        place = text.find(self.end)
        if place < 0:
            return None
        rest = text[place + len(self.end) :].lstrip()  # white space after the reasoning is not shown
        return self._after_mark(text, len(text) - len(rest)) if rest else None

    def _after_mark(self, text: str, start: int) -> int | None:
        """Return where content from `start` on begins: after a mark if one is there; None if the mark is cut."""
        rest = text[start:].lstrip()
        mark = next((mark for mark in self.content_marks if rest.startswith(mark)), None)
        if mark is not None:
            return len(text) - len(rest) + len(mark)
        return None if self._is_cut_mark(rest, self.content_marks) else start

    @staticmethod
    def _is_cut_mark(text: str, marks: Sequence[str]) -> bool:
        return any(mark != text and mark.startswith(text) for mark in marks)


class StopMatch(NamedTuple):
    """The end of a text by a stop string."""

    num_tokens: int  # of the step's tokens, those to keep
    num_shown: int  # of these and the undecided tokens before them, those up to the end of the stop string
    num_after: int  # characters of the last of these that follow the stop string
    string: str  # of several that end at the same place, the longest


class StopStrings:
    """Search for stop strings, one or more and none empty, in the text of growing token ids.

    The text is that of Detokenizer, with special tokens. It ends with the first token at which it contains a string. No
    string is found in the text of `context` or across its end, nor in a chat's `reasoning` part. One in the first white
    space of an answer ends it with the token that shows that no such part begins.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        strings: Sequence[str],
        context: Sequence[int] = (),
        reasoning: Reasoning | None = None,
    ):
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=False)
        self._strings = strings
        self._longest = max(map(len, strings))  # characters
        self._reasoning = reasoning  # None once the content has begun
        # Whether the tokens so far, `_undecided`, may belong to the reasoning part or to the content.
        self.is_undecided = reasoning is not None and bool(reasoning.begin)
        self._undecided: list[int] = []
        self._text = ""  # returned by the detokenizer: its end, or all of it before the content
        # Text that only grows contains later what it contains now, so a whole step is searched at once.
        self._only_grows = self._detokenizer.only_appends and not any(REPLACEMENT in string for string in strings)

    def __call__(self, committed: Sequence[int]) -> int | None:
        """Return how many committed tokens to keep if a stop string ends in them, else None; see state.Stop."""
        match = self.find(committed)
        return None if match is None else match.num_tokens

    def find(self, committed: Sequence[int]) -> StopMatch | None:
        """Append a step's tokens; return the first match in them, after which nothing may be appended."""
        num_before = len(self._undecided)
        tokens = [*self._undecided, *committed]
        if not self._only_grows or self._search(tokens) is not None:
            for num in range(num_before + 1, len(tokens) + 1):
                if self._search(tokens[:num]) is not None:
                    return self._first(tokens[:num], num - num_before)
        if self.is_undecided:
            assert self._reasoning is not None
            self.is_undecided = self._reasoning.is_undecided(self._detokenizer.peek(tokens))
            self._undecided = tokens if self.is_undecided else []
            if self.is_undecided:
                return None
        self._text += self._detokenizer.add(tokens)
        if self._reasoning is not None and (start := self._reasoning.content_start(self._text)) is not None:
            self._text, self._reasoning = self._text[start:], None
        if self._reasoning is None:
            self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
        return None

    def finish(self) -> StopMatch | None:
        """Return the first match in tokens that are still undecided: the answer has ended, so they are content."""
        self._reasoning = None
        return self._first(self._undecided, 0)

    def _first(self, tokens: Sequence[int], num_kept: int) -> StopMatch | None:
        """Return the first match in tokens that show where the content begins; the step keeps `num_kept` tokens."""
        start = self._content_start(self._text + self._detokenizer.peek(tokens))
        matches = (self._search(tokens[:num], start) for num in range(1, len(tokens) + 1))
        match = next(filter(None, matches), None)
        return None if match is None else match._replace(num_tokens=num_kept)

    def _search(self, tokens: Sequence[int], start: int | None = None) -> StopMatch | None:
        """Return the match in content that begins at `start`; None: where the tokens' text shows it."""
        text = self._text + self._detokenizer.peek(tokens)
        start = self._content_start(text) if start is None else start
        content = "" if start is None else text[start:]
        ends = [(place + len(each), -len(each), each) for each in self._strings if (place := content.find(each)) >= 0]
        if not ends:
            return None
        end, _, string = min(ends)
        return StopMatch(len(tokens), len(tokens), len(content) - end, string)

    def _content_start(self, text: str) -> int | None:
        return 0 if self._reasoning is None else self._reasoning.content_start(text)


def check_stop_strings(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
    """Raise RequestError if no text of a tokenizer contains a string: capitals, for example."""
    decode = Decoding(tokenizer, skip_special_tokens=False)
    unusual = [each for each in strings if each not in decode(tokenizer(each, add_special_tokens=False).input_ids)]
    texts = frozenset(TokenTexts(tokenizer).all_bytes(len(tokenizer))) - {b""} if unusual else frozenset()
    for string in unusual:
        if not _can_be_spelled(string.encode(), texts):
            raise RequestError(f"stop={string!r}: can never match: no text of the model's tokenizer contains it")


def _can_be_spelled(wanted: bytes, texts: Set[bytes]) -> bool:
    """Return whether a sequence of texts contains `wanted`."""
    if any(wanted in text for text in texts):
        return True
    reached, ends = _partial_matches(wanted, texts)
    size, longest = len(wanted), max(map(len, texts), default=0)
    for num in range(1, size):
        if num in reached and num in ends:
            return True
        if num in reached:
            reached |= {end for end in range(num + 1, min(num + longest + 1, size)) if wanted[num:end] in texts}
    return False


def _partial_matches(wanted: bytes, texts: Set[bytes]) -> tuple[set[int], set[int]]:
    """Return (starts, ends): lengths of the parts of `wanted` that end a text, and those before a part that begins one.

    Looks at each text once, however long `wanted` is.
    """
    size = len(wanted)
    starts: set[int] = set()
    ends: set[int] = set()
    for text in texts:
        lengths = range(1, min(len(text) + 1, size))
        if text[-1] in wanted:  # skips most texts
            starts |= {num for num in lengths if text.endswith(wanted[:num])}
        if text[0] in wanted:
            ends |= {size - num for num in lengths if text.startswith(wanted[size - num :])}
    return starts, ends
