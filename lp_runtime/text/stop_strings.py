"""Stop strings: where the text of new tokens first contains one of several strings."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError
from lp_runtime.text.decoding import REPLACEMENT, Decoding
from lp_runtime.text.detokenizer import Detokenizer
from lp_runtime.text.token_text import TokenTexts


class Reasoning(NamedTuple):
    """The marks between which the reasoning part of a chat's answer lies."""

    # None if the prompt has begun the part; else an answer that does not begin with it has no such part.
    begin: str | None
    end: str

    def content_start(self, text: str) -> int | None:
        """Return where the answer's content begins in its text; None as long as it has not begun."""
        stripped = text.lstrip()
        if self.begin and not stripped.startswith(self.begin):
            return None if self.begin.startswith(stripped) else 0
        place = text.find(self.end)
        if place < 0:
            return None
        rest = text[place + len(self.end) :].lstrip()  # white space after the reasoning is not shown
        return len(text) - len(rest) if rest else None


class StopMatch(NamedTuple):
    """The end of a text by a stop string."""

    num_tokens: int  # of the tokens that were searched, those up to the end of the stop string
    num_after: int  # characters of the last of them that follow the stop string
    string: str  # of several that end at the same place, the longest


class StopStrings:
    """Search for stop strings, one or more and none empty, in the text of growing token ids.

    The text is that of Detokenizer, with special tokens. It ends with the first token at which it contains a string. No
    string is found in the text of `context` or across its end, nor in a chat's `reasoning` part.
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
        self._text = ""  # returned by the detokenizer: its end, or all of it before the content
        # Text that only grows contains later what it contains now, so a whole step is searched at once.
        self._only_grows = self._detokenizer.only_appends and not any(REPLACEMENT in string for string in strings)

    def __call__(self, committed: Sequence[int]) -> int | None:
        """Return how many committed tokens to keep if a stop string ends in them, else None; see state.Stop."""
        match = self.find(committed)
        return None if match is None else match.num_tokens

    def find(self, committed: Sequence[int]) -> StopMatch | None:
        """Append a step's tokens; return the first match in them, after which nothing may be appended."""
        if not self._only_grows or self._search(committed) is not None:
            for num in range(1, len(committed) + 1):
                if (match := self._search(committed[:num])) is not None:
                    return match
        self._text += self._detokenizer.add(committed)
        if self._reasoning is not None and (start := self._reasoning.content_start(self._text)) is not None:
            self._text, self._reasoning = self._text[start:], None
        if self._reasoning is None:
            self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
        return None

    def _search(self, tokens: Sequence[int]) -> StopMatch | None:
        text = self._text + self._detokenizer.peek(tokens)
        if self._reasoning is not None:
            start = self._reasoning.content_start(text)
            text = "" if start is None else text[start:]
        ends = [(place + len(each), -len(each), each) for each in self._strings if (place := text.find(each)) >= 0]
        if not ends:
            return None
        end, _, string = min(ends)
        return StopMatch(len(tokens), len(text) - end, string)


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
