"""Token ids from text, and text from token ids as they come, never with half a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError, first_line

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a prompt, special tokens added as the model wants them.

    Raises:
        RequestError: if the text is no Unicode that can be encoded (lone surrogates).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from error
    return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The token ids of a conversation, ready for the model's answer, by the model's chat template.

    Args:
        messages: each with "role" and "content".

    Raises:
        RequestError: if the model has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages: the model has no chat template; give a prompt instead")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs, and raise what they like
        raise RequestError(f"messages: the model's chat template refuses them: {first_line(error)}") from error
    return encode(tokenizer, text, add_special_tokens=False)  # the template has put them


class TextStream:
    """Decodes a growing sequence of token ids piece by piece; the pieces add up to the decoded whole.

    Args:
        tokenizer: the model's.
        skip_special_tokens: leave them out of the text.
    """

    CONTEXT = 8  # tokens decoded again before the new ones: some decoders look at what stands before

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first token of the stretch being decoded
        self._shown = 0  # tokens whose text has been returned

    def add(self, ids: Sequence[int]) -> str:
        """The text that the new tokens complete; bytes of an unfinished character wait for the next call."""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._shown])
        now = self._decode(self._ids[self._start :])
        if now.endswith(REPLACEMENT):
            return ""
        self._shown = len(self._ids)
        self._start = max(self._start, self._shown - self.CONTEXT)
        while self._start < self._shown and self._decode(self._ids[self._start : self._shown]).startswith(REPLACEMENT):
            self._start += 1
        return now[len(before) :]

    def finish(self) -> str:
        """What is left, without a character that was never finished."""
        return self.peek()

    def peek(self) -> str:
        """The same, and nothing changes: further tokens may finish the character."""
        before = self._decode(self._ids[self._start : self._shown])
        now = self._decode(self._ids[self._start :])
        return now[len(before) :].rstrip(REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Finds the first end of a stop string in new text, special tokens included, as its tokens come.

    Args:
        tokenizer: the model's.
        strings: at least one character each.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self._stream = TextStream(tokenizer, skip_special_tokens=False)
        self._strings = strings
        self._longest = max(map(len, strings))
        self._tail = ""  # of the text so far, as much as a stop string may begin in

    def add(self, token: int) -> int | None:
        """How many characters stand behind the stop string that this token completes; None if it completes none."""
        text = self._tail + self._stream.add([token])
        unfinished = self._stream.peek()  # a stop string may end before a character that is not whole yet
        ends = [start + len(string) for string in self._strings if (start := (text + unfinished).find(string)) >= 0]
        self._tail = text[len(text) - self._longest + 1 :] if len(text) >= self._longest else text
        return len(text) + len(unfinished) - min(ends) if ends else None

    def __call__(self, run: Sequence[int]) -> int | None:
        """How many tokens of a run to keep if a stop string ends in it, else None: a lookahead.state.Stop."""
        return next((i for i, token in enumerate(run, start=1) if self.add(token) is not None), None)
