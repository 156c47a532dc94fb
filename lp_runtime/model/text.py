"""Token ids from text, and text from token ids as they come, never with half a character."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import RequestError

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a prompt, special tokens added as the model wants them.

    Raises:
        RequestError: if the text is no Unicode that can be encoded (lone surrogates).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from error
    return tokenizer(text, verbose=False).input_ids


class TextStream:
    """Decodes a growing sequence of token ids piece by piece; the pieces add up to the decoded whole.

    Args:
        tokenizer: the model's.
    """

    CONTEXT = 8  # tokens decoded again before the new ones: some decoders look at what stands before

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first token of the stretch being decoded
        self._shown = 0  # tokens whose text has been returned

    def add(self, ids: Sequence[int]) -> str:
        """The text that the new tokens complete; bytes of an unfinished character wait for the next call."""
        self._ids += ids
        return self._take(final=False)

    def finish(self) -> str:
        """What is left, unfinished characters included."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        now = self._decode(self._ids[self._start :])
        if not final and now.endswith(REPLACEMENT):
            return ""
        self._shown = len(self._ids)
        self._start = max(self._start, self._shown - self.CONTEXT)
        while self._start < self._shown and self._decode(self._ids[self._start : self._shown]).startswith(REPLACEMENT):
            self._start += 1
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
