"""JSON that stays one line for every reader."""

from __future__ import annotations

import json
from collections.abc import Mapping

# JSON allows them unescaped in strings, but str.splitlines and some stream readers end a line there.
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def to_json(body: Mapping[str, object]) -> str:
    """Serialize an object to one line that UTF-8 can encode: line ends and lone surrogates stay escaped."""
    return json.dumps(body, ensure_ascii=False).translate(LINE_ENDS).encode(errors="backslashreplace").decode()
