"""An answer as a message of OpenAI's API."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lp_runtime.chat.chat_format import PROMPT_END_TOKENS, ChatFormat
from lp_runtime.chat.formats import others_than_reasoning
from lp_runtime.chat.pieces import Piece
from lp_runtime.chat.stop_trimmer import StopTrimmer
from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.model.tokenizer import special_tokens
from lp_runtime.request.request import Request
from lp_runtime.request.request_text import RequestText
from lp_runtime.text.harmony import MESSAGE_START


class AnswerReader:
    """Splits the new tokens of a request that was made from a conversation into pieces, as they come."""

    def __init__(self, chat: ChatFormat, tokenizer: Tokenizer, request: Request):
        tools = request.tools or ()
        skips_special = request.skip_special_tokens and not chat.shows_special_tokens(tools)
        self._text = RequestText(replace(request, skip_special_tokens=skips_special, logprobs=False), tokenizer)
        self._trimmer = StopTrimmer(request.stop, special_tokens(tokenizer) if skips_special else ())
        self._parser = chat.parser(tools, end_of(request.prompt_ids, tokenizer))
        self._ends, self._is_ended = request.eos_token_ids, False  # by the model

    def add(self, token_ids: Sequence[int]) -> list[Piece]:
        self._is_ended |= bool(token_ids) and token_ids[-1] in self._ends
        return self._pieces(self._trimmer.add(self._text.add(token_ids)[0]))

    def finish(self) -> list[Piece]:
        """Return the rest, after the last token."""
        rest = self._trimmer.add(self._text.finish()[0]) + self._trimmer.finish(self._text.stop)
        is_cut = self._text.stop is not None or not self._is_ended
        return self._pieces(rest) + ([] if self._parser is None else self._parser.finish(is_cut))

    def _pieces(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if self._parser is None else self._parser.add(text)


def read_message(chat: ChatFormat, tokenizer: Tokenizer, request: Request, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the message of the new tokens of a request that was made from a conversation."""
    reader = AnswerReader(chat, tokenizer, request)
    return message_of([*reader.add(token_ids), *reader.finish()])


def end_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a prompt's last tokens and of all of its last message, which the answer may continue."""
    starts = _message_starts(tokenizer)
    length = next((number for number, token in enumerate(reversed(prompt_ids), 1) if token in starts), 0)
    text = tokenizer.decode(list(prompt_ids[-max(PROMPT_END_TOKENS, length) :]))
    assert isinstance(text, str)  # a list only for a batch of sequences
    return text


@functools.lru_cache(maxsize=16)
def _message_starts(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens after which a message begins: in harmony one, else all that mark no reasoning."""
    added = {each.content: token for token, each in tokenizer.added_tokens_decoder.items()}
    texts = [MESSAGE_START] if MESSAGE_START in added else others_than_reasoning(added)
    return frozenset(added[text] for text in texts)


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    parts = parts_of(pieces)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in parts.pop("tool_calls", [])]
    content = None if calls else ""
    return {"role": "assistant", "content": content, **parts, **({"tool_calls": calls} if calls else {})}


def parts_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the content, reasoning_content and tool_calls that pieces have, as in a delta of a message.

    Reasoning has two names: `reasoning_content`, and `reasoning` as in newer versions of vLLM.
    """
    parts: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.kind != "arguments":
            name = "content" if piece.kind == "content" else "reasoning_content"
            parts[name] = parts.get(name, "") + piece.text
        elif piece.call in calls:
            calls[piece.call]["function"]["arguments"] += piece.text
        else:
            calls[piece.call] = _call(piece)
    if "reasoning_content" in parts:
        parts["reasoning"] = parts["reasoning_content"]
    return {**parts, "tool_calls": list(calls.values())} if calls else parts


def _call(piece: Piece) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.call, "function": {"arguments": piece.text}}
    function = {"name": piece.name, "arguments": piece.text}
    return {"index": piece.call, "id": piece.call_id, "type": "function", "function": function}
