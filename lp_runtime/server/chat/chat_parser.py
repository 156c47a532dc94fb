"""Streaming parsers that split a chat answer into reasoning, text and tool calls.

Each model family has its own syntax for calls. Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`. Llama 3 writes `{"name": ..., "parameters": {...}}` as the whole answer. Mistral writes
`[TOOL_CALLS][{...}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`. gpt-oss writes channels of OpenAI's harmony format.
Reasoning is enclosed in `<think>` and `</think>`.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lp_runtime.server.chat.call_reader import CallReader
from lp_runtime.server.chat.json_scanner import JsonScanner

THINK, END_OF_THINK = "<think>", "</think>"
NAMED_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
MAX_NAME_CHARS = 256  # of `name[ARGS]`; longer text is not a call


@dataclass(frozen=True)
class Piece:
    """A fragment of one part of an answer.

    Attributes:
        kind: "arguments" is JSON text of a call's arguments.
        call: index of the call that arguments belong to.
        name: name of the tool; in a call's first piece only.
        call_id: in a call's first piece only.
    """

    kind: Literal["reasoning", "content", "arguments"]
    text: str
    call: int = 0
    name: str | None = None
    call_id: str | None = None


class ChatParser(ABC):
    """State machine that splits one streamed answer into pieces.

    A state reads what it can from the buffer, and returns whether the next state can read on at once.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._scanner: JsonScanner | None = None  # of the current call's arguments
        self._state: Callable[[bool], bool] = self._start

    @abstractmethod
    def _start(self, is_end: bool) -> bool:
        """Run the first state."""

    def add(self, text: str) -> list[Piece]:
        """Append text; return the new pieces."""
        return self._run(text, is_end=False)

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the answer."""
        return self._run("", is_end=True)

    def _run(self, text: str, is_end: bool) -> list[Piece]:
        self._buffer += text
        while self._state(is_end):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            self._pieces.append(Piece(kind, text))

    def _begin_call(self, name: str) -> None:
        self._pieces.append(Piece("arguments", "", self.num_calls, name, f"call_{uuid.uuid4().hex[:24]}"))
        self.num_calls += 1
        self._scanner = JsonScanner()

    def _read_arguments(self) -> bool:
        """Emit the arguments read so far; return whether they have ended."""
        assert self._scanner is not None
        num = self._scanner.add(self._buffer)
        if num:
            self._pieces.append(Piece("arguments", self._buffer[:num], self.num_calls - 1))
        self._buffer = self._buffer[num:]
        return self._scanner.is_done

    def _until(self, kind: Literal["reasoning", "content"], marks: tuple[str, ...], is_end: bool) -> str | None:
        """Emit text up to the first mark, and consume and return that mark; None if there is none yet."""
        places = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            self._emit(kind, self._buffer[:place])
            self._buffer = self._buffer[place + len(mark) :]
            return mark
        num = len(self._buffer) if is_end else len(self._buffer) - held_back(self._buffer, marks)
        self._emit(kind, self._buffer[:num])
        self._buffer = self._buffer[num:]
        return None


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = max(map(len, marks), default=0) - 1
    for num in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-num:]) for mark in marks):
            return num
    return 0


class TextParser(ChatParser):
    """Parser for optional `<think>` reasoning, then text, then tool calls after a mark.

    Args:
        has_reasoning: whether a reasoning part may come first.
        is_thinking: whether the prompt has already opened the reasoning part.
        marks: strings that begin calls; empty to look for none.
        end: string that ends a call; empty if the closing brace does.
        bare: whether an answer that begins with a call's JSON object is a call, without a mark.
        is_either: whether the answer, after its reasoning part, is either only calls or only text.
    """

    def __init__(
        self,
        has_reasoning: bool,
        is_thinking: bool,
        marks: tuple[str, ...] = (),
        end: str = "",
        bare: bool = False,
        is_either: bool = False,
    ):
        self._marks = marks
        self._end = end
        self._bare = bare
        self._is_thinking = is_thinking
        self._has_reasoning, self._is_either = has_reasoning, is_either
        self._call = CallReader()  # of the current object
        super().__init__()

    def _start(self, is_end: bool) -> bool:
        if not self._has_reasoning:
            self._state = self._begin_text
        elif self._is_thinking:
            self._state = self._think
        else:
            stripped = self._buffer.lstrip()
            if not is_end and THINK.startswith(stripped[: len(THINK)]) and len(stripped) < len(THINK):
                return False
            if stripped.startswith(THINK):
                self._buffer, self._state = stripped[len(THINK) :], self._think
            else:
                self._state = self._begin_text
        return True

    def _think(self, is_end: bool) -> bool:
        if self._until("reasoning", (END_OF_THINK,), is_end) is None:
            return False
        self._state = self._after_thinking
        return True

    def _after_thinking(self, is_end: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._begin_text
        return True

    def _begin_text(self, is_end: bool) -> bool:
        stripped = self._buffer.lstrip()
        if (self._bare or self._is_either) and not stripped and not is_end:
            return False
        if self._bare and stripped.startswith("{"):
            self._state = self._read_head
        elif not self._is_either or stripped.startswith(self._marks):
            self._state = self._text
        elif not is_end and any(mark.startswith(stripped) for mark in self._marks):
            return False
        else:
            self._only_text()
        return True

    def _only_text(self) -> None:
        """Emit the buffer as text, and go on reading text."""
        self._emit("content", self._buffer)
        self._buffer = ""
        if self._is_either:  # a mark inside the text is text
            self._marks = ()
        self._state = self._text

    def _text(self, is_end: bool) -> bool:
        if not self._marks:
            self._emit("content", self._buffer)
            self._buffer = ""
            return False
        if self._until("content", self._marks, is_end) is None:
            return False
        self._state = self._read_head
        return True

    def _read_head(self, is_end: bool) -> bool:
        """Read a call's `name[ARGS]`, or start to read an object that may be a call."""
        stripped = self._buffer.lstrip(" \t\r\n[,;")
        if stripped.startswith("{"):
            self._call, self._state = CallReader(), self._read_object
            return True
        named = NAMED_HEAD.match(self._buffer) if self._marks and not self._end else None
        if named is not None:
            self._begin_call(named.group(1))
            self._buffer = self._buffer[named.end() :]
            self._state = self._arguments
            return True
        is_object = bool(self._end or self._bare)
        if is_end or (is_object and stripped) or len(self._buffer) > MAX_NAME_CHARS:  # not a readable call: text
            self._only_text()
        return False

    def _read_object(self, is_end: bool) -> bool:
        """Read an object; emit its arguments if it is a call, or else its text."""
        call, is_known = self._call, self._call.name is not None
        arguments, self._buffer = call.add(self._buffer), ""
        if call.name is None:
            if call.is_refused or is_end:
                self._buffer = call.text
                self._only_text()
            return False
        if not is_known:
            self._begin_call(call.name)
        if arguments:
            self._pieces.append(Piece("arguments", arguments, self.num_calls - 1))
        if call.is_done:
            self._buffer, self._state = call.rest, self._after_call
        return call.is_done

    def _arguments(self, is_end: bool) -> bool:
        if not self._read_arguments():
            return False
        self._state = self._after_call
        return True

    def _after_call(self, is_end: bool) -> bool:
        """Skip the end mark of a call."""
        if self._end:
            place = self._buffer.find(self._end)
            if place < 0:
                return False
            self._buffer, self._state = self._buffer[place + len(self._end) :], self._between_calls
            return True
        self._state = self._between_calls
        return True

    def _between_calls(self, is_end: bool) -> bool:
        self._buffer = self._buffer.lstrip(" \n\t,;]" if not self._end else " \n\t")
        if not self._buffer:
            return False
        if not self._end and self._buffer.startswith("{"):
            self._state = self._read_head
            return True
        self._state = self._text
        return True


CHANNEL, MESSAGE, ENDS = "<|channel|>", "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class HarmonyParser(ChatParser):
    """Parser for harmony's channels: analysis is reasoning, a message to functions.NAME is a call."""

    def __init__(self) -> None:
        super().__init__()
        self._kind: Literal["reasoning", "content"] = "content"

    def _start(self, is_end: bool) -> bool:
        """Read a message's header, up to `<|message|>`."""
        place = self._buffer.find(MESSAGE)
        if place < 0:
            return False
        head, self._buffer = self._buffer[:place], self._buffer[place + len(MESSAGE) :]
        recipient = re.search(r"to=functions\.([\w.-]+)", head)
        if recipient is not None:
            self._begin_call(recipient.group(1))
            self._state = self._arguments
        else:
            self._kind = "reasoning" if f"{CHANNEL}analysis" in head else "content"
            self._state = self._body
        return True

    def _body(self, is_end: bool) -> bool:
        if self._until(self._kind, ENDS, is_end) is None:
            return False
        self._state = self._start
        return True

    def _arguments(self, is_end: bool) -> bool:
        if not self._read_arguments():
            return False
        self._state = self._after_call
        return True

    def _after_call(self, is_end: bool) -> bool:
        place = min((at for mark in ENDS if (at := self._buffer.find(mark)) >= 0), default=None)
        if place is None:
            return False
        self._buffer, self._state = self._buffer[place:], self._start
        return True
