"""Parser of answers by the response template that a model brings."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lp_runtime.chat.chat_parser import ChatParser, Kind, Piece, new_call_id

KINDS: dict[str, Kind] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
}
CALLS = "tool_calls"
UNREADABLE = KeyError, TypeError, ValueError  # raised by transformers for text that does not fit the template


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

    def add(self, text: str) -> list[Piece]:
        if self._parser is None:
            return [Piece("content", text)] if text else []
        parser, unread, num_calls = copy.deepcopy(self._parser), self._unread, self.num_calls
        try:
            return self._pieces(self._parser.feed(text))
        except UNREADABLE:
            self._parser, self._unread = parser, unread
            self.num_calls = num_calls
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

    def finish(self) -> list[Piece]:
        if self._parser is None:
            return []
        try:
            return self._pieces(self._parser.finalize()[1])
        except UNREADABLE:
            return self._give_up("")

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
                self._unread = ""
                calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
                pieces += [piece for call in calls for piece in self._call(call)]
        return pieces

    def _call(self, call: Mapping[str, Any]) -> list[Piece]:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.num_calls += 1
        number, call_id = self.num_calls - 1, call.get("id") or new_call_id()
        return [Piece("arguments", "", number, function["name"], call_id), Piece("arguments", text, number)]
