"""Removes the stop string that ended a text, as the OpenAI API does."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Passes text on as it comes, and holds back an end that may be the beginning of a stop string.

    Args:
        stops: the stop strings; may be empty.
        special_tokens: texts of special tokens: stop strings may have them, the text does not show them.
        is_cut: whether a text that a stop string has ended ends with it; else the last token may spell more.
    """

    def __init__(self, stops: Sequence[str], special_tokens: Sequence[str] = (), is_cut: bool = True):
        self._is_cut = is_cut
        self._ends = [_without(stop, special_tokens) for stop in stops]  # of the text, where a stop string ends it
        self._whole = [end for end, stop in zip(self._ends, stops, strict=True) if end == stop]
        self._held = ""

    def add(self, text: str) -> str:
        """Append a text; return what can be passed on now."""
        self._held += text
        end = min((place for _, place in self._found(self._held)), default=None)
        if end is None:
            longest = max(map(len, self._ends), default=0)
            starts = range(max(0, len(self._held) - longest), len(self._held))
            whole = len(self._held)
            end = next((at for at in starts if any(stop.startswith(self._held[at:]) for stop in self._ends)), whole)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def finish(self, is_stopped: bool) -> str:
        """Return the rest of the text, without the stop string if one has ended it."""
        text, self._held = self._held, ""
        if is_stopped and not self._is_cut:
            text = text[: min((at + len(stop) for stop, at in self._found(text)), default=len(text))]
            text = text[: min((at for _, at in self._found(text)), default=len(text))]
        elif is_stopped:
            text = text[: len(text) - max((len(end) for end in self._ends if text.endswith(end)), default=0)]
        return text

    def _found(self, text: str) -> list[tuple[str, int]]:
        """Return the stop strings that a text has, each with its first place."""
        return [(stop, place) for stop in self._whole if (place := text.find(stop)) >= 0]


def _without(text: str, special_tokens: Sequence[str]) -> str:
    """Return a text with special tokens removed."""
    for token in special_tokens:
        text = text.replace(token, "")
    return text
