"""Tests that JSON is written on one line, by every definition of a line end."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from lp_runtime.utils.json_line import to_json

ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # of str.splitlines


@given(st.text(st.sampled_from(ENDS + 'a"\\\u00e9\ud800\udfff\U0001f600')))
def test_any_text_becomes_one_utf8_encodable_line(text):
    line = to_json({text: text})
    assert line.splitlines() == [line]
    # A surrogate pair is read as the character that it spells.
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert json.loads(line.encode()) == {whole: whole}
