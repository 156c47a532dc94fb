"""Token ids from text, and text from a growing sequence of token ids, never with half a character."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lp_runtime.errors import ConfigError, RequestError, first_line

REPLACEMENT = "\ufffd"  # a decoder shows it for bytes that are no whole character yet
BREAK = "\ufdd0"  # stands in text that is no special token though it reads like one; Unicode keeps it for such uses
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how tokens of one byte are written where pieces are text
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of pieces that are bytes, as of GPT-2
CONTEXT_TOKENS = 8  # decoded again before the new ones: some decoders look at what stands before


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        tokenizer: the model's.
        text: the prompt.
        add_special_tokens: whether special tokens are added as the model wants them.
        split_special_tokens: whether special tokens that are written in the text are plain text.

    Raises:
        RequestError: if the text is no Unicode that can be encoded (lone surrogates).
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
    """Return the token ids of a conversation, ready for the model's answer, by the model's chat template.

    Args:
        tokenizer: the model's.
        messages: each with "role" and "content"; the role "developer" is "system" where the template does not know it.
        split_special_tokens: whether special tokens that are written in the messages are plain text; those of the
            template are special in any case.
        tools: that the model may call, each as in the OpenAI API.

    Raises:
        RequestError: if the model has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages: the model has no chat template; give a prompt instead")
    try:
        specials = _special_tokens(tokenizer) if split_special_tokens else ()
        known = _with_known_roles(messages, chat_template(tokenizer))
        conversation = cast(list[dict[str, str]], [_broken(message, specials) for message in known])
        shown = cast(list[dict | Callable], [dict(tool) for tool in tools]) or None
        text = tokenizer.apply_chat_template(conversation, tools=shown, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs, and raise what they like
        raise RequestError(f"messages: the model's chat template refuses them: {first_line(error)}") from error
    if BREAK not in text:
        return encode(tokenizer, cast(str, text), add_special_tokens=False)  # the template has added them
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, specials))})", cast(str, text)):
        if piece in specials:
            ids.append(cast(int, tokenizer.convert_tokens_to_ids(piece)))
        elif piece:
            plain = piece.replace(BREAK, "")
            ids += encode(tokenizer, plain, add_special_tokens=False, split_special_tokens=True)
    return ids


def _with_known_roles(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """Return messages without the role "developer", OpenAI's name, where a template would drop what that one says."""
    if "developer" in template:
        return messages
    return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a model's chat templates; empty without any."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def conversation(turns: Sequence[str], answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return a conversation's messages up to the turn behind the last answer.

    Args:
        turns: the user's texts, more than there are answers.
        answers: the assistant's texts, one to each of the first turns.
    """
    said = [{"role": "user", "content": text} for text in turns[: len(answers) + 1]]
    answered = [{"role": "assistant", "content": text} for text in answers]
    return [message for pair in zip(said, answered, strict=False) for message in pair] + said[len(answers) :]


def check_chat_template(tokenizer: PreTrainedTokenizerBase, location: str) -> None:
    """Refuse, for chat=true, a model that has no chat template.

    Args:
        tokenizer: the model's.
        location: the model's directory or hub id, for the error's message.

    Raises:
        ConfigError: the model has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"chat=true: the model {location} has no chat template")


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of a tokenizer's special tokens, the longest first."""
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(specials, key=len, reverse=True)


def _broken(value: Any, specials: Sequence[str]) -> Any:
    """Return a message, or a part of one, with a BREAK inside every special token that its texts have."""
    if isinstance(value, Mapping):
        return {key: _broken(each, specials) for key, each in value.items()}
    if isinstance(value, list):
        return [_broken(each, specials) for each in value]
    if isinstance(value, str) and specials:
        value = value.replace(BREAK, "")
        for special in specials:
            value = value.replace(special, special[:1] + BREAK + special[1:])
    return value


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the UTF-8 bytes of a token, which may be a part of a character."""
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
    """Decodes a growing sequence of token ids delta by delta; the deltas add up to the decoded whole.

    Args:
        tokenizer: the model's.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first token that is decoded again with the next ones
        self._num_returned = 0  # tokens whose text has been returned

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that new tokens, `ids`, complete; bytes of an unfinished character wait for the next call."""
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
        """Return the text that `add` has not returned, without a character that was never finished."""
        return self.peek()

    def peek(self) -> str:
        """Return the text that `add` has not returned, without an unfinished character; `add` may return both later."""
        before = self._decode(self._ids[self._start : self._num_returned])
        now = self._decode(self._ids[self._start :])
        return now[len(before) :].rstrip(REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        """Return the text of token ids, exactly as the tokens spell it."""
        options = {"skip_special_tokens": self._skip_special_tokens, "clean_up_tokenization_spaces": False}
        return cast(str, self._tokenizer.decode(ids, **options))


class StopStrings:
    """Finds the first end of a stop string in a growing sequence of token ids, special tokens included.

    Args:
        tokenizer: the model's.
        strings: at least one, of at least one character each.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self._stream = TextStream(tokenizer, skip_special_tokens=False)
        self._strings = strings
        self._longest = max(map(len, strings))  # characters
        self._tail = ""  # end of the text so far, in which a stop string may have begun

    def add(self, token: int) -> int | None:
        """Add a token; return how many characters follow the stop string that the token completes, None without one."""
        text = self._tail + self._stream.add([token])
        unfinished = self._stream.peek()  # a stop string may end before a character that is not whole yet
        ends = [start + len(string) for string in self._strings if (start := (text + unfinished).find(string)) >= 0]
        self._tail = text[len(text) - self._longest + 1 :] if len(text) >= self._longest else text
        return len(text) + len(unfinished) - min(ends) if ends else None

    def __call__(self, committed: Sequence[int]) -> int | None:
        """Return how many of a step's committed tokens to keep, if a stop string ends in them; else None.

        This is what lookahead.state.Stop asks for.

        Args:
            committed: token ids that follow those of earlier calls.
        """
        return next((i for i, token in enumerate(committed, start=1) if self.add(token) is not None), None)
