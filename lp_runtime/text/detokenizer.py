"""Incremental detokenization: text of a growing sequence, in deltas that later tokens never change.

The text of new tokens N after a context P is `decode(P + N)` after its longest common prefix with `decode(P)`. This is
`decode(P + N)[len(decode(P)):]`, except if N completes a character that P began.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lp_runtime.errors import ModelError
from lp_runtime.text.decoding import REPLACEMENT, Decoding

CONTEXT_TOKENS = 8  # tokens before new ones that are decoded again; ordinary text has a visible character in them
MAX_WINDOW_TOKENS = 4 * CONTEXT_TOKENS  # length at which a shorter window is looked for
MAX_TRIED = 64  # places at which a window is tried to begin


class Detokenizer:
    """Incremental detokenizer of one sequence.

    It decodes a window: the last tokens of the sequence, from a place at which decoding can begin. The first tokens of
    the window have been returned; they are decoded again because the text of a token may depend on what precedes it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        # The prompt that the text continues; empty if the text begins with the first new token, as a chat's answer.
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        splits_tokens: bool = False,  # whether to fill `token_texts`, at the cost of decoding after each token
    ):
        self._decode = Decoding(tokenizer, skip_special_tokens)
        self._ids = list(context)  # of the window
        self._ids = self._ids[self._window_start() :]
        self._text = self._context = self._decode(self._ids)
        self._num_returned: int | None = None  # characters of `_text` that were returned; None before the first
        self._returned = ""  # these characters
        self._max_window = max(MAX_WINDOW_TOKENS, 2 * len(self._ids))
        # Text of each new token, in order, up to the first that is not final. Joined, they equal the text.
        self.token_texts: list[str] = []
        self._splits_tokens = splits_tokens
        self._unsplit: list[str] = []  # the window's text after each token that is not in `token_texts` yet
        self._num_split = 0  # characters of `_text` that are in `token_texts`, or precede the first new token's

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that they add and that no later token can change."""
        if self._splits_tokens:
            return "".join([self._add([token]) for token in token_ids])
        return self._add(token_ids)

    def finish(self) -> str:
        """Return the rest of the text; incomplete characters at its end are U+FFFD, as in `decode`."""
        return self._return(len(self._text), is_end=True)

    def peek(self, token_ids: Sequence[int] = ()) -> str:
        """Return the text after what was returned, if these were the last tokens; append nothing."""
        text = self._decode([*self._ids, *token_ids]) if token_ids else self._text
        return text[self._start_in(text) :]

    @property
    def only_appends(self) -> bool:
        return self._decode.only_appends

    def _add(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        self._text = self._decode(self._ids)
        if self._splits_tokens:
            self._unsplit.append(self._text)
        delta = self._return(self._decode.final_length(self._text, self._ids))
        if len(self._ids) > self._max_window:
            self._shorten()
        return delta

    def _start_in(self, text: str) -> int:
        """Return where the text that was not returned begins in a text of the window."""
        if self._num_returned is None:
            return common_length(text, self._context)
        if not text.startswith(self._returned):
            raise ModelError(
                "the tokenizer's decode is not a function of the token ids: text that was final has changed"
            )
        return self._num_returned

    def _return(self, num_final: int, is_end: bool = False) -> str:
        """Return the text up to `num_final` characters of the window's text."""
        start = self._start_in(self._text)
        if self._splits_tokens:
            self._split(self._text[:num_final], start, is_end)
        if num_final <= start:
            return ""
        self._num_returned, self._returned = num_final, self._text[:num_final]
        return self._text[start:num_final]

    def _split(self, final: str, start: int, is_end: bool) -> None:
        """Extend `token_texts`. A token ends where the text after it stops to agree with the final text.

        `final` is the final part of the window's text. New text begins in it at `start`, if none was returned yet.
        """
        if self._num_returned is None:
            self._num_split = start
        while self._unsplit:
            text = self._unsplit[0]
            num = common_length(text, final)
            if num == len(final) < len(text) and not is_end:
                break  # the rest of the text is not final
            num = max(num, self._num_split)
            self.token_texts.append(final[self._num_split : num])
            self._num_split = num
            self._unsplit.pop(0)

    def _shorten(self) -> None:
        """Let the window begin later, if it can, so that the cost of a step does not grow with the text."""
        can_shorten = self._num_returned is not None and not self._unsplit
        start = self._window_start() if can_shorten else 0
        if start:
            text, rest = self._decode(self._ids[start:]), self._text[self._num_returned :]
            returned = text.removesuffix(rest)
            if len(returned) + len(rest) == len(text) and is_visible(returned):
                self._ids, self._text = self._ids[start:], text
                self._returned = returned
                self._num_returned = self._num_split = len(returned)
        self._max_window = max(MAX_WINDOW_TOKENS, 2 * len(self._ids))

    def _window_start(self) -> int:
        """Return the last place, some tokens before the window's end, at which decoding can begin; else 0."""
        last = len(self._ids) - CONTEXT_TOKENS
        places = range(last, max(0, last - MAX_TRIED), -1)
        return next((place for place in places if self._can_begin_at(place)), 0)

    def _can_begin_at(self, place: int) -> bool:
        """Whether decoding from a place gives the end of the whole text, whatever tokens follow.

        The text before the place must be final, and end with the last token's. A visible character follows: decoders
        that strip the beginning of a text then strip nothing after it. Decoders handle a run of bytes as one piece, so
        none may cross the place.
        """
        if all(map(self._decode.is_byte, self._ids[place:])):
            return False
        before = self._ids[max(0, place - CONTEXT_TOKENS) : place]
        text, after = self._decode(before), self._decode(self._ids[place:])
        return (
            is_visible(after)
            and len(text) > len(self._decode(before[:-1]))
            and self._decode.final_length(text, before) == len(text)
            and self._decode([*before, *self._ids[place:]]).endswith(after.lstrip())
        )


def common_length(first: str, second: str) -> int:
    return len(os.path.commonprefix([first, second]))


def is_visible(text: str) -> bool:
    """Whether a text has a character other than white space and U+FFFD."""
    return bool(text.replace(REPLACEMENT, "").strip())
