"""Tests that stop strings are removed however the text is cut into chunks."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from lp_runtime.chat.stop_trimmer import StopTrimmer

HIDDEN = "#"  # stands for a special token
texts = st.text("ab\n", max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(0, 12), max_size=5)


def until_a_stop(text: str, stops: list[str]) -> str:
    """Return the text up to the first end of a stop string, where a request ends."""
    return text[: min((place + len(stop) for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(text=texts, stops=stops, cuts=cuts)
def test_trimmer_removes_exactly_the_stop_string(text, stops, cuts):
    text = until_a_stop(text, stops)
    stop = max((stop for stop in stops if text.endswith(stop)), key=len, default=None)
    rest = text if stop is None else text.removesuffix(stop)
    trimmer, shown = StopTrimmer(stops), ""
    for piece in in_pieces(text, cuts):
        shown += trimmer.add(piece)
        assert rest.startswith(shown)
    assert shown + trimmer.finish(stop) == rest


@given(text=st.text("ab#", max_size=12), stop=st.text("ab#", min_size=1, max_size=4), cuts=cuts)
def test_stop_string_may_contain_a_hidden_token(text, stop, cuts):
    assume(HIDDEN in stop)
    text = until_a_stop(text, [stop])
    is_stopped = text.endswith(stop)
    trimmer = StopTrimmer([stop], [HIDDEN])
    shown = "".join(trimmer.add(piece.replace(HIDDEN, "")) for piece in in_pieces(text, cuts))
    shown += trimmer.finish(stop if is_stopped else None)
    assert shown == (text.removesuffix(stop) if is_stopped else text).replace(HIDDEN, "")


def test_partial_stop_is_shown_if_another_stop_ends_the_text():
    trimmer = StopTrimmer(["<|end|>", "<b>"], ["<|end|>"])
    assert trimmer.add("a <") == "a " and trimmer.finish("<|end|>") == "<"


def test_text_that_cannot_be_a_stop_is_shown_at_once():
    trimmer = StopTrimmer(["END"])
    assert [trimmer.add(piece) for piece in ("on", "e E", "N", "d", "EN", "D")] == ["on", "e ", "", "ENd", "", ""]
    assert trimmer.finish("END") == ""
