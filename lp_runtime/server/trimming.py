"""Text without the stop string that ended it: OpenAI's clients do not expect it."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Passes text on as it comes, but holds back what may be the beginning of a stop string.

    Args:
        stops: the stop strings; may be none.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """What can be passed on, now that this text has come."""
        self._held += text
        end = min((place for stop in self._stops if (place := self._held.find(stop)) >= 0), default=None)
        if end is None:
            longest = max(map(len, self._stops), default=1) - 1
            starts = range(max(0, len(self._held) - longest), len(self._held))
            whole = len(self._held)
            end = next((at for at in starts if any(stop.startswith(self._held[at:]) for stop in self._stops)), whole)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def finish(self, is_stopped: bool) -> str:
        """What is left to pass on at the end: nothing behind or of a stop string that has ended the text."""
        text, self._held = self._held, ""
        return "" if is_stopped else text
