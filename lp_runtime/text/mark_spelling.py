"""Spelling of marks by tokens: where growing token ids have a mark in their text, and which tokens write it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError
from lp_runtime.text.token_text import TokenTexts

OTHER = b"\xff"  # in place of the text of tokens that are part of no mark; UTF-8 does not have this byte


@dataclass(frozen=True)
class MarkSpelling:
    """The tokens that can spell the marks of a reasoning part, which models may split in several ways.

    It needs no tokenizer, so that it can be sent to replicas.
    """

    begin: bytes  # empty if the prompt has begun the part
    end: bytes
    texts: Mapping[int, bytes]  # of the tokens that may overlap a mark, and of white space
    next_tokens: Sequence[int]  # the token that continues `end`, by how many bytes of it are there

    def part_start(self, tokens: Sequence[int]) -> int | None:
        """Return how many tokens precede the text of the reasoning part; None if it has not begun."""
        if not self.begin:
            return 0
        text = b""
        for num, token in enumerate(tokens, 1):
            text = (text + self.texts.get(token, OTHER)).lstrip()
            if text.startswith(self.begin):
                return num
            if not self.begin.startswith(text):
                return None
        return None

    def next_token(self, part: Sequence[int]) -> int | None:
        """Return the token that writes, or continues, the end mark after tokens of the part; None if they have it."""
        text = b"".join([self.texts.get(token, OTHER) for token in part])
        return None if self.end in text else self.next_tokens[_overlap(text, self.end)]


@functools.lru_cache(maxsize=16)  # looks at the whole vocabulary
def spelling_of(tokenizer: PreTrainedTokenizerBase, begin: str, end: str) -> MarkSpelling:
    """Return the spelling of the marks in a tokenizer's vocabulary; RequestError if it cannot write the end mark."""
    marks = [mark.encode() for mark in (begin, end) if mark]
    starts = tuple(mark[:num] for mark in marks for num in range(1, len(mark) + 1))
    ends = tuple(mark[num:] for mark in marks for num in range(len(mark)))

    def may_overlap(text: bytes) -> bool:
        return text.endswith(starts) or text.startswith(ends) or any(text in mark or mark in text for mark in marks)

    vocabulary = enumerate(TokenTexts(tokenizer).all_bytes(len(tokenizer)))
    texts = {token: text for token, text in vocabulary if text and (text.isspace() or may_overlap(text))}
    usual = tokenizer(end, add_special_tokens=False).input_ids
    return MarkSpelling(begin.encode(), end.encode(), texts, _next_tokens(end.encode(), texts, usual))


def _next_tokens(end: bytes, texts: Mapping[int, bytes], usual: Sequence[int]) -> list[int]:
    """Return the token after each number of bytes of `end`: that of the usual spelling, else the longest."""
    known, text = dict[int, int](), b""
    for token in usual:
        num, text = _overlap(text, end), text + texts.get(token, OTHER)
        if end in text or _overlap(text, end) > num:
            known.setdefault(num, token)
    for num in range(len(end)):
        fitting = [token for token, each in texts.items() if end.startswith(each, num)]
        if num not in known and not fitting:
            raise RequestError(f"the tokenizer cannot write {end.decode()!r}, the end of the reasoning part")
        known.setdefault(num, max(fitting, key=lambda token: len(texts[token]), default=0))
    return [known[num] for num in range(len(end))]


def _overlap(text: bytes, mark: bytes) -> int:
    """Return how many bytes of a mark, but not all, are at the end of a text."""
    return next(num for num in range(len(mark) - 1, -1, -1) if text.endswith(mark[:num]))
