"""Parser of answers by the response template that a model brings."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lp_runtime.chat.pieces import ChatParser, Kind, Piece, new_call_id
from lp_runtime.chat.text_reader import object_in

KINDS: dict[str, Kind] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
}
CALLS = "tool_calls"
# Raised for text that does not fit the template, by transformers or because a call is no object or has no name.
UNREADABLE = AttributeError, KeyError, RecursionError, TypeError, ValueError


class ResponseParser(Protocol):
    """transformers' parser of a streamed answer, which returns events."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class TemplateParser(ChatParser):
    """Parser that leaves the reading to transformers; each call comes when it has ended.

    Text that transformers cannot read is content, and so is all that follows.
    """

    def __init__(self, parser: ResponseParser):
        self._parser: ResponseParser | None = parser
        self._unread = ""  # text of a call that has not ended
        self._num_calls = 0

    def add(self, text: str) -> list[Piece]:
        if self._parser is None:
            return [Piece("content", text)] if text else []
        parser, unread, num_calls = copy.deepcopy(self._parser), self._unread, self._num_calls
        try:
            return self._pieces(self._parser.feed(text))
        except UNREADABLE:
            self._parser, self._unread = parser, unread
            self._num_calls = num_calls
            return self._add_each(text)

    def _add_each(self, text: str) -> list[Piece]:
        """Append text that cannot be read as a whole: all events before the unreadable place count."""
        pieces: list[Piece] = []
        for place, character in enumerate(text):
            assert self._parser is not None
            try:
                pieces += self._pieces(self._parser.feed(character))
            except UNREADABLE:
                return pieces + self._give_up(text[place:])
        return pieces

    def finish(self, is_cut: bool = False) -> list[Piece]:
        if self._parser is None:
            return []
        try:
            return self._pieces(self._parser.finalize()[1])
        except UNREADABLE:
            return [] if is_cut else self._give_up("")

    def _give_up(self, text: str) -> list[Piece]:
        text, self._unread, self._parser = self._unread + text, "", None
        return [Piece("content", text)] if text else []

    def _pieces(self, events: Iterable[Mapping[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            kind = KINDS.get(event["field"])
            if event["type"] == "region_chunk" and kind is not None:
                pieces.append(Piece(kind, event["text"]))
            elif event["type"] == "region_chunk":
                self._unread += event["text"]
            elif event["type"] == "region_close" and event["field"] == CALLS:
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                calls = list(map(_read_call, values))
                self._unread = ""
                pieces += [piece for call in calls for piece in self._call(*call)]
        return pieces

    def _call(self, name: str, arguments: str, call_id: str) -> list[Piece]:
        self._num_calls += 1
        number = self._num_calls - 1
        return [Piece("arguments", "", number, name, call_id), Piece("arguments", arguments, number)]


def _read_call(call: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return (name, arguments as JSON, id) of a call; raise one of UNREADABLE if it is none."""
    function = call.get("function", call)
    if not isinstance(name := function["name"], str):
        raise TypeError(f"the name of a call is {name!r}")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return name, object_in(text) or "{}", call.get("id") or new_call_id()
