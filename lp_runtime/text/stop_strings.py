"""Stop strings: where the text of new tokens first contains one of several strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lp_runtime.text.decoding import REPLACEMENT
from lp_runtime.text.detokenizer import Detokenizer
from lp_runtime.text.reasoning import Reasoning


class StopMatch(NamedTuple):
    """The end of a text by a stop string."""

    num_tokens: int  # of the step's tokens, those to keep
    num_shown: int  # of these and the held tokens before them, those up to the end of the stop string
    num_after: int  # characters of the last of these that follow the stop string
    string: str  # of several that end at the same place, the longest


class StopStrings:
    """Search for stop strings, one or more and none empty, in the text of growing token ids.

    The text is that of Detokenizer, with special tokens. It ends with the first token at which it contains a string. No
    string is found in the text of `context` or across its end, nor in a chat's `reasoning` part. Tokens are held while
    they may be content or the beginning of that part; they are searched once a later token or the end decides.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        strings: Sequence[str],
        context: Sequence[int] = (),
        reasoning: Reasoning | None = None,
        min_tokens: int = 0,  # first tokens in whose text no string may end
    ):
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=False)
        self._strings = strings
        self._longest = max(map(len, strings))  # characters
        self._reasoning = reasoning  # None once the content has begun
        self._num_skipped = min_tokens  # of the held and the next tokens, those in whose text no string may end
        self._held: list[int] = []
        self._text = ""  # end of the text before the held tokens; its content has no match
        # Text that only grows contains later what it contains now, so a whole step is searched at once.
        self._only_grows = self._detokenizer.only_appends and not any(REPLACEMENT in string for string in strings)

    @property
    def holds_tokens(self) -> bool:
        return bool(self._held)

    def __call__(self, committed: Sequence[int]) -> int | None:
        """Return how many committed tokens to keep if a stop string ends in them, else None; see state.Stop."""
        match = self.find(committed)
        return None if match is None else match.num_tokens

    def find(self, committed: Sequence[int]) -> StopMatch | None:
        """Append a step's tokens; return the first match in them, after which nothing may be appended."""
        tokens = [*self._held, *committed]
        text = self._text_after(tokens)
        start, num_deciding = self._content_start(tokens, text)
        match = None if start is None else self._first_match(tokens, text, start)
        if match is not None:
            return match._replace(num_tokens=max(match.num_shown, num_deciding) - len(self._held))
        if self._reasoning is not None and start is None and self._reasoning.is_undecided(text):
            self._held = tokens
        else:
            self._append(tokens)
        return None

    def finish(self) -> StopMatch | None:
        """Return the first match in tokens that are still held, after the last token."""
        text = self._text_after(self._held)
        start = 0 if self._reasoning is None else self._reasoning.content_start(text, is_whole=True)
        return None if start is None else self._first_match(self._held, text, start)

    def _content_start(self, tokens: Sequence[int], text: str) -> tuple[int | None, int]:
        """Return where the content begins in the tokens' text, and how many tokens show that; (None, 0) before it."""
        if self._reasoning is None:
            return 0, 0
        if self._reasoning.content_start(text) is None:
            return None, 0
        starts = map(self._reasoning.content_start, self._texts(tokens, text))
        return next((start, num) for num, start in enumerate(starts, 1) if start is not None)

    def _first_match(self, tokens: Sequence[int], text: str, start: int) -> StopMatch | None:
        """Return the match in the fewest tokens in whose text the content, which begins at `start`, has a string."""
        skipped = self._text_after(tokens[: self._num_skipped]) if self._num_skipped else self._text
        num_skipped = max(0, len(skipped) - start)
        if self._only_grows and self._first_string(text[start:], num_skipped) is None:
            return None
        for num, text_so_far in enumerate(self._texts(tokens, text), 1):
            if (ending := self._first_string(text_so_far[start:], num_skipped)) is not None:
                end, string = ending
                return StopMatch(num, num, len(text_so_far) - start - end, string)
        return None

    def _first_string(self, content: str, num_skipped: int) -> tuple[int, str] | None:
        """Return (end, string) of the string that ends first after some characters of the content; None without one."""
        places = [(content.find(each, max(0, num_skipped - len(each) + 1)), each) for each in self._strings]
        ends = [(place + len(each), -len(each), each) for place, each in places if place >= 0]
        if not ends:
            return None
        end, _, string = min(ends)
        return end, string

    def _texts(self, tokens: Sequence[int], text: str) -> Iterator[str]:
        """Yield the text after each of some tokens; `text` is that after the last."""
        for num in range(1, len(tokens)):
            yield self._text_after(tokens[:num])
        yield text

    def _text_after(self, tokens: Sequence[int]) -> str:
        return self._text + self._detokenizer.peek(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        """Add the text of tokens without a match to `_text`, and drop what no later match can reach."""
        self._held = []
        self._num_skipped = max(0, self._num_skipped - len(tokens))
        self._text += self._detokenizer.add(tokens)
        if self._reasoning is not None:
            self._reasoning, self._text = self._reasoning.left_after(self._text)
        if self._reasoning is None:
            self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
