"""Conversion of text to token ids, and of a growing sequence of token ids to whole characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lp_runtime.errors import ConfigError, RequestError, first_line

REPLACEMENT = "\ufffd"  # what decoders emit for an incomplete character
BREAK = "\ufdd0"  # inserted into text that only looks like a special token; a Unicode noncharacter, so never real text
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # spelling of single-byte tokens in vocabularies of text pieces
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # for byte-level vocabularies (GPT-2)
CONTEXT_TOKENS = 8  # tokens decoded again with the new ones: some decoders depend on the preceding tokens


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of a prompt.

    Raises RequestError if the text is not encodable Unicode (lone surrogates).

    Args:
        add_special_tokens: whether to add special tokens (such as BOS) as the tokenizer is configured to.
        split_special_tokens: whether special tokens spelled out in the text are encoded as plain text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from error
    options = {"split_special_tokens": True} if split_special_tokens else {}
    return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **options).input_ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    split_special_tokens: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the token ids of a conversation, rendered by the chat template up to the model's next answer.

    Raises RequestError if the model has no chat template, or the template rejects the messages.

    Args:
        messages: each with "role" and "content"; "developer" becomes "system" if the template does not know that role.
        split_special_tokens: whether special tokens spelled out in the messages are encoded as plain text; those of the
            template always stay special.
        tools: functions that the model may call, each in the OpenAI API's format.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages: the model has no chat template; give a prompt instead")
    try:
        specials = _special_tokens(tokenizer) if split_special_tokens else ()
        known = _with_known_roles(messages, chat_template(tokenizer))
        conversation = cast(list[dict[str, str]], [_with_breaks(message, specials) for message in known])
        shown = cast(list[dict | Callable], [dict(tool) for tool in tools]) or None
        text = tokenizer.apply_chat_template(conversation, tools=shown, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs and may raise anything
        raise RequestError(f"messages: the model's chat template refuses them: {first_line(error)}") from error
    if BREAK not in text:
        return encode(tokenizer, cast(str, text), add_special_tokens=False)  # the template has already added them
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, specials))})", cast(str, text)):
        if piece in specials:
            ids.append(cast(int, tokenizer.convert_tokens_to_ids(piece)))
        elif piece:
            plain = piece.replace(BREAK, "")
            ids += encode(tokenizer, plain, add_special_tokens=False, split_special_tokens=True)
    return ids


def _with_known_roles(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """Return messages with OpenAI's role "developer" renamed to "system" if the template lacks it."""
    if "developer" in template:
        return messages
    return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a model's chat templates; empty without any."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def conversation(turns: Sequence[str], answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return a conversation as messages that end with the user's turn after the last answer.

    `turns` are the user's texts, more than there are answers; `answers` are the assistant's, one for each of the first
    turns.
    """
    said = [{"role": "user", "content": text} for text in turns[: len(answers) + 1]]
    answered = [{"role": "assistant", "content": text} for text in answers]
    return [message for pair in zip(said, answered, strict=False) for message in pair] + said[len(answers) :]


def check_chat_template(tokenizer: PreTrainedTokenizerBase, location: str) -> None:
    """Refuse a model without a chat template, for chat=true; `location` is for the message only."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"chat=true: the model {location} has no chat template")


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of a tokenizer's special tokens, longest first."""
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(specials, key=len, reverse=True)


def _with_breaks(value: Any, specials: Sequence[str]) -> Any:
    """Return a message, or a part of one, with BREAK inserted into each special token spelled out in it."""
    if isinstance(value, Mapping):
        return {key: _with_breaks(each, specials) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_breaks(each, specials) for each in value]
    if isinstance(value, str) and specials:
        value = value.replace(BREAK, "")
        for special in specials:
            value = value.replace(special, special[:1] + BREAK + special[1:])
    return value


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the UTF-8 bytes of a token; they may be only a part of a character."""
    text = cast(str, tokenizer.decode([token]))
    if REPLACEMENT not in text:
        return text.encode()
    piece = cast(str, tokenizer.convert_ids_to_tokens(token))
    if (spelled := BYTE_TOKEN.fullmatch(piece)) is not None:
        return bytes.fromhex(spelled.group(1))
    if all(character in BYTES for character in piece):
        return bytes(BYTES[character] for character in piece)
    return text.encode()


class TextStream:
    """Incremental detokenizer: decodes a growing sequence of token ids into deltas of whole characters.

    The deltas, concatenated, equal the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first of the context tokens, which are decoded again with the new ones
        self._num_returned = 0  # tokens whose text has been returned

    def add(self, ids: Sequence[int]) -> str:
        """Append tokens; return the text that they complete. Bytes of an unfinished character are held back."""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._num_returned])
        now = self._decode(self._ids[self._start :])
        if now.endswith(REPLACEMENT):
            return ""
        self._num_returned = len(self._ids)
        self._start = max(self._start, self._num_returned - CONTEXT_TOKENS)
        while self._start < self._num_returned and self._decode(self._ids[self._start : self._num_returned]).startswith(
            REPLACEMENT
        ):
            self._start += 1
        return now[len(before) :]

    def finish(self) -> str:
        """Return the text that `add` has held back, without a character that was never finished."""
        return self.peek()

    def peek(self) -> str:
        """Return the text that `add` has held back, without an unfinished character.

        A later `add` may return the same text.
        """
        before = self._decode(self._ids[self._start : self._num_returned])
        now = self._decode(self._ids[self._start :])
        return now[len(before) :].rstrip(REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without transformers' clean-up of spaces."""
        options = {"skip_special_tokens": self._skip_special_tokens, "clean_up_tokenization_spaces": False}
        return cast(str, self._tokenizer.decode(ids, **options))


class StopStrings:
    """Finder of stop strings, one or more and none empty, in growing token ids, special ones included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self._stream = TextStream(tokenizer, skip_special_tokens=False)
        self._strings = strings
        self._longest = max(map(len, strings))  # characters
        self._tail = ""  # end of the text so far: may hold the beginning of a stop string

    def add(self, token: int) -> int | None:
        """Add a token; return how many characters follow the stop string it completes, or None without one."""
        text = self._tail + self._stream.add([token])
        unfinished = self._stream.peek()  # a stop string may be followed by the first bytes of a character
        ends = [start + len(string) for string in self._strings if (start := (text + unfinished).find(string)) >= 0]
        self._tail = text[len(text) - self._longest + 1 :] if len(text) >= self._longest else text
        return len(text) + len(unfinished) - min(ends) if ends else None

    def __call__(self, committed: Sequence[int]) -> int | None:
        """Return how many of a step's committed tokens to keep if a stop string ends in them, else None.

        Implements lookahead.state.Stop: `committed` follows the tokens of earlier calls.
        """
        return next((i for i, token in enumerate(committed, start=1) if self.add(token) is not None), None)
