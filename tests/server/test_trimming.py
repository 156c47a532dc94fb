"""Stop strings are taken off, however the text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lp_runtime.server.trimming import StopTrimmer

texts = st.text("ab\n", max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


@given(text=texts, stops=stops, cuts=st.lists(st.integers(0, 12), max_size=5))
def test_nothing_behind_a_stop_is_shown_and_nothing_before_it_is_lost(text, stops, cuts):
    # A request ends with the first end of a stop string.
    text = text[: min((place + len(stop) for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    first = min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
    trimmer, shown = StopTrimmer(stops), ""
    for piece in pieces:
        shown += trimmer.add(piece)
        assert text.startswith(shown) and (first is None or len(shown) <= first)
    shown += trimmer.finish(is_stopped=first is not None)
    assert shown == text[:first]


def test_what_cannot_be_a_stop_is_shown_at_once():
    trimmer = StopTrimmer(["END"])
    assert [trimmer.add(piece) for piece in ("on", "e E", "N", "d", "EN", "D more")] == ["on", "e ", "", "ENd", "", ""]
    assert trimmer.finish(is_stopped=True) == ""
