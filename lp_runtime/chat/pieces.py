"""Pieces of a chat answer, and what collects them."""

from __future__ import annotations

import itertools
import secrets
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lp_runtime.chat.formats import LONG_ID, SHORT_ID

Kind = Literal["reasoning", "content", "arguments"]


@dataclass(frozen=True)
class Piece:
    """A fragment of one part of an answer. The text of "arguments" is JSON."""

    kind: Kind
    text: str
    call: int = 0  # index of the call that arguments belong to
    name: str | None = None  # of the tool; in a call's first piece only
    call_id: str | None = None  # in a call's first piece only


class ChatParser(ABC):
    """Splits one streamed answer into pieces."""

    @abstractmethod
    def add(self, text: str) -> list[Piece]:
        """Append text; return the new pieces."""

    @abstractmethod
    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces at the end of the answer; `is_cut`: a limit or a stop string ended it."""


class NewPieces:
    """The pieces that a parser has read since it last returned some."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.num_calls = 0  # begun so far

    def content(self, text: str) -> None:
        self._pieces.append(Piece("content", text))

    def thought(self, text: str) -> None:
        self._pieces.append(Piece("reasoning", text))

    def begin_call(self, name: str, call_id: str) -> None:
        self._pieces.append(Piece("arguments", "", self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append arguments of the last call."""
        if text:
            self._pieces.append(Piece("arguments", text, self.num_calls - 1))

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Append pieces of another parser, before any other call."""
        for piece in pieces:
            self._pieces.append(piece)
            self.num_calls += piece.name is not None

    def returned(self) -> list[Piece]:
        """Return the pieces, once; those of one part are joined, because each becomes an event of a stream."""
        groups = itertools.groupby(self._pieces, lambda piece: (piece.kind, piece.call, piece.call_id))
        parts = [list(group) for _, group in groups]
        self._pieces = []
        return [replace(part[0], text="".join(piece.text for piece in part)) if part[1:] else part[0] for part in parts]


def new_call_id(text: str = LONG_ID, values: Mapping[str, str | None] | None = None) -> str:
    """Return an id of a call, a random one if the call has none.

    `values` are those of a format's placeholders, by their names in lower case.
    """
    if text == SHORT_ID:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    if text == LONG_ID:
        return f"call_{uuid.uuid4().hex[:24]}"
    for name, value in (values or {}).items():
        text = text.replace(f"${name.upper()}", value or "")
    return text or new_call_id(SHORT_ID)
