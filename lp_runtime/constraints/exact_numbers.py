"""Numbers of `enum` and `const`, which xgrammar writes as doubles of 17 digits: 0.1 as 0.10000000000000001."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lp_runtime.constraints.grammar_checks import BYTES

MARK = "\ufdd0"  # Unicode assigns no character
MARKED = re.compile(f'"?{MARK}([-+.0-9e]+){MARK}"?'.encode())  # XML has a text without quotes
MIN_INT, MAX_INT = -(2**63), 2**63 - 1  # beyond these, xgrammar has doubles


def mark_numbers(value: Any) -> Any:
    """Return a JSON value with a marked text for each number that xgrammar would write otherwise than Python."""
    if isinstance(value, Mapping):
        return {key: mark_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [mark_numbers(each) for each in value]
    is_written_otherwise = isinstance(value, float) or (isinstance(value, int) and not MIN_INT <= value <= MAX_INT)
    return f"{MARK}{json.dumps(value)}{MARK}" if is_written_otherwise else value


def with_numbers(grammar: Any) -> Any:
    """Return a Grammar with numbers in place of the marked texts in its literals."""
    content = json.loads(grammar.serialize_json())
    data, starts, written = content["grammar_expr_data"], content["grammar_expr_indptr"], list[int]()
    for place, start in enumerate(starts):
        code, values = data[start], data[start + 2 : start + 2 + data[start + 1]]
        if code == BYTES:
            values = [*MARKED.sub(rb"\1", bytes(value % 256 for value in values))]
        starts[place] = len(written)
        written += [code, len(values), *values]
    if written == data:
        return grammar
    content["grammar_expr_data"] = written
    return type(grammar).deserialize_json(json.dumps(content))
