"""Removal of the stop string that ended a text, as in the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Filter for streamed text that holds back a suffix that may be, or become, the final stop string.

    Stop strings may contain special tokens although the text does not show them.
    """

    def __init__(self, stops: Sequence[str], special_tokens: Sequence[str] = ()):
        self._shown = {stop: _without(stop, special_tokens) for stop in stops}  # what the text shows of each
        self._longest = max(map(len, self._shown.values()), default=0)
        self._held = ""

    def add(self, text: str) -> str:
        """Append text; return what can be shown now."""
        self._held += text
        starts = range(max(0, len(self._held) - self._longest), len(self._held))
        shown = tuple(self._shown.values())
        end = next((at for at in starts if any(each.startswith(self._held[at:]) for each in shown)), len(self._held))
        text, self._held = self._held[:end], self._held[end:]
        return text

    def finish(self, stop: str | None) -> str:
        """Return the rest of the text, without the stop string that ended it if that is one of `stops`."""
        text, self._held = self._held, ""
        return text if stop is None else text.removesuffix(self._shown.get(stop, ""))


def _without(text: str, special_tokens: Sequence[str]) -> str:
    for token in special_tokens:
        text = text.replace(token, "")
    return text
