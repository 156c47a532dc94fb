"""Removal of the stop string that ended a text, as in the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Filter for streamed text that holds back a suffix that may begin a stop string.

    Args:
        special_tokens: texts of special tokens; stop strings may contain them although the text does not show them.
        is_cut: whether a stopped text ends exactly with its stop string; if not, its last token may continue past it.

    Attributes:
        found: the stop string that ended the text, the longest if several end there; None if none has.
    """

    def __init__(self, stops: Sequence[str], special_tokens: Sequence[str] = (), is_cut: bool = True):
        self.found: str | None = None
        self._is_cut = is_cut
        self._stops = stops
        self._ends = [_without(stop, special_tokens) for stop in stops]  # what the text shows of each stop string
        # Stop strings that show in full. What is left of the others may occur in a text that they have not ended.
        self._whole = [end for end, stop in zip(self._ends, stops, strict=True) if end == stop]
        self._held = ""

    def add(self, text: str) -> str:
        """Append text; return what can be shown now."""
        self._held += text
        end = min((place for _, place in self._find_stops(self._held)), default=None)
        if end is None:
            longest = max(map(len, self._ends), default=0)
            starts = range(max(0, len(self._held) - longest), len(self._held))
            whole = len(self._held)
            end = next((at for at in starts if any(stop.startswith(self._held[at:]) for stop in self._ends)), whole)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def finish(self, is_stopped: bool) -> str:
        """Return the rest of the text; with `is_stopped`, without the stop string that ended it."""
        text, self._held = self._held, ""
        if is_stopped and not self._is_cut:
            # Decoding stopped at the stop string that is complete first; of those in the text up to there, cut at the
            # one that begins first.
            found = self._find_stops(text)
            if found:
                end, _, self.found = min((at + len(stop), -len(stop), stop) for stop, at in found)
                text = text[: min(at for _, at in self._find_stops(text[:end]))]
        elif is_stopped:
            ends = [(len(end), stop) for end, stop in zip(self._ends, self._stops, strict=True) if text.endswith(end)]
            num, self.found = max(ends, default=(0, None))
            text = text[: len(text) - num]
        return text

    def _find_stops(self, text: str) -> list[tuple[str, int]]:
        """Return (stop string, offset of its first occurrence) for each one in the text."""
        return [(stop, place) for stop in self._whole if (place := text.find(stop)) >= 0]


def _without(text: str, special_tokens: Sequence[str]) -> str:
    """Remove special tokens from a text."""
    for token in special_tokens:
        text = text.replace(token, "")
    return text
