"""The text of a request's new tokens, as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from lp_runtime.model.hf.types import Tokenizer
from lp_runtime.request.request import Request
from lp_runtime.text.decoding import special_ids
from lp_runtime.text.detokenizer import Detokenizer, common_length
from lp_runtime.text.stop_strings import StopMatch, StopStrings


class RequestText:
    """The text of one request: deltas that end with the stop string, `stop`, if any."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        context = request.text_context
        self.stop: str | None = None
        self._detokenizer = Detokenizer(tokenizer, context, request.skip_special_tokens, request.logprobs)
        searched = request.stop, context, request.reasoning, request.stop_after
        self._stop_strings = StopStrings(tokenizer, *searched) if request.stop else None
        # Special tokens that end the text show none, although others do. An ordinary token that ends it shows its own.
        self._hidden = frozenset() if request.skip_special_tokens else request.eos_token_ids & special_ids(tokenizer)
        self._held: list[int] = []  # tokens whose text is not shown before it is known whether it may be cut
        self._num_hidden = 0  # tokens at the end that show no text, although special tokens do
        self._num_texts = 0  # texts of tokens that were returned

    def add(self, token_ids: Sequence[int]) -> tuple[str, Sequence[str]]:
        """Append a step's tokens; return the text that they complete, and the texts of the completed tokens."""
        self._held += token_ids
        match = None if self._stop_strings is None else self._stop_strings.find(token_ids)
        if match is None and self._stop_strings is not None and self._stop_strings.holds_tokens:
            return "", ()
        return self._show(match), self._texts()

    def finish(self) -> tuple[str, Sequence[str]]:
        """Return the rest of the text and of the tokens' texts, after the last token."""
        text = ""
        if self._held and self._stop_strings is not None:
            text = self._show(self._stop_strings.finish())
        text += "" if self.stop is not None else self._detokenizer.finish()
        return text, [*self._texts(), *[""] * self._num_hidden]

    def _show(self, match: StopMatch | None) -> str:
        """Return the text that the held tokens complete, up to a match."""
        held, self._held = self._held, []
        shown = [token for token in held if token not in self._hidden]
        self._num_hidden += len(held) - len(shown)
        if match is None:
            return self._detokenizer.add(shown)
        self.stop = match.string
        before = self._detokenizer.peek(shown[: match.num_shown - 1])
        text = self._detokenizer.peek(shown[: match.num_shown])
        self._detokenizer.add(shown)  # tokens have whole texts
        self._detokenizer.finish()
        num_last = len(text) - common_length(before, text)  # characters of the last token; none if it is special
        return text[: len(text) - min(match.num_after, num_last)]

    def _texts(self) -> Sequence[str]:
        texts = self._detokenizer.token_texts[self._num_texts :]
        self._num_texts += len(texts)
        return texts
