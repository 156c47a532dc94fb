"""Text without the stop string that ended it: OpenAI's clients do not expect it."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Passes text on as it comes, but holds back what may be the beginning of a stop string.

    Args:
        stops: the stop strings; may be none.
        special_tokens: texts of the tokens that stop strings are looked for in, but that the text does not show.
    """

    def __init__(self, stops: Sequence[str], special_tokens: Sequence[str] = ()):
        self._ends = [_without(stop, special_tokens) for stop in stops]  # what the text ends with when a stop ends it
        self._whole = [end for end, stop in zip(self._ends, stops, strict=True) if end == stop]
        self._held = ""

    def add(self, text: str) -> str:
        """What can be passed on, now that this text has come."""
        self._held += text
        end = min((place for stop in self._whole if (place := self._held.find(stop)) >= 0), default=None)
        if end is None:
            longest = max(map(len, self._ends), default=0)
            starts = range(max(0, len(self._held) - longest), len(self._held))
            whole = len(self._held)
            end = next((at for at in starts if any(stop.startswith(self._held[at:]) for stop in self._ends)), whole)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def finish(self, is_stopped: bool) -> str:
        """What is left to pass on at the end: all but the stop string, if one has ended the text."""
        text, self._held = self._held, ""
        if is_stopped:
            text = text[: len(text) - max((len(end) for end in self._ends if text.endswith(end)), default=0)]
        return text


def _without(text: str, special_tokens: Sequence[str]) -> str:
    for token in special_tokens:
        text = text.replace(token, "")
    return text
