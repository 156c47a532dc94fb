"""Random JSON schemas with characters of all Unicode planes, constraints that use them, random texts."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lp_runtime.chat.chat_format import ChatFormat, ToolUse
from lp_runtime.chat.formats import FORMATS
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.grammar_guide import GrammarGuide, Vocabulary

# Ranges of code points. Those likelier to be chosen are repeated: printed grammars break Latin-1 next to hex digits.
RANGES = [
    *[(0x80, 0xFF)] * 4,
    *[(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)] * 2,
    (0x20, 0x7F),
    (0x100, 0x7FF),
    (0x800, 0xD7FF),
    (0x2000, 0x206F),
    (0xE000, 0xFFFF),
    (0x10000, 0x1FFFF),
    (0x20000, 0x10FFFF),
]
ESCAPED = '\n\t\r\b\f"\\/\0\x1b\x1f\x7f\u2028\u2029'  # JSON must escape some, and may escape others
MAX_TOKENS = 2000  # of a random text
LATE = 60  # tokens after which random texts tend to end
DEPTH = 2  # of nested schemas
EMOJI = (0x1F600, 0x1F64F)


def random_text(rng: random.Random, least: int = 1, most: int = 5, is_plain: bool = False) -> str:
    """Return a text; `is_plain`: without characters that JSON escapes."""
    actual = ""
    while len(actual) < rng.randint(least, most):
        is_escaped = rng.random() < 0.1
        character = rng.choice(ESCAPED) if is_escaped else chr(rng.randint(*rng.choice(RANGES)))
        if not (is_plain and (character < " " or character in '"\\')):
            actual += character
    return actual


def random_pattern(rng: random.Random) -> str:
    """Return a regular expression in the syntax that Python's `re` and JSON schemas share."""
    parts = [_pattern_part(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.2:
        parts = [f"(?:{'|'.join(parts)}){rng.choice(['', '?', '{2}', '+'])}"]
    return f"^{''.join(parts)}$"


def _pattern_part(rng: random.Random) -> str:
    character = random_text(rng, 1, 1, is_plain=True)
    form = rng.randrange(6)
    if form == 0 and character <= "\xff":
        part = f"\\x{ord(character):02x}"
    elif form == 1 and character <= "\uffff":
        part = f"\\u{ord(character):04x}"
    elif form == 2:
        first, last = sorted(rng.sample(range(0xC0, 0x2FF), 2))
        part = f"[{chr(first)}-\\u{last:04x}{rng.choice(['', '0-9', '_'])}]"
    elif form == 3:
        members = "".join(re.escape(each) if each.isascii() else each for each in random_text(rng, 1, 3, is_plain=True))
        part = f"[{rng.choice(['', '^'])}{members}]"
    elif form == 4:
        part = rng.choice([".", r"\d", r"\w", "[a-f]", f"[{chr(EMOJI[0])}-{chr(EMOJI[1])}]"])
    else:
        part = re.escape(character) if character.isascii() else character
    return part + rng.choice(["", "", "?", "*", "+", "{2}", "{1,3}"])


def random_value(rng: random.Random, depth: int = 1) -> Any:
    """Return a JSON value, for `enum` and `const`."""
    if depth and rng.random() < 0.2:
        if rng.random() < 0.5:
            return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 2))]
        return {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.randint(0, 2))}
    return rng.choice([random_text(rng, 0, 6), random_text(rng), rng.randint(-9, 999), rng.random(), None, True])


def random_schema(rng: random.Random, depth: int = DEPTH) -> dict[str, Any]:
    """Return a schema; at depth 0, a schema without nested schemas."""
    kind = rng.choice(["record"] * 5 + ["array", "union", "map"]) if depth else "value"
    if depth == DEPTH and rng.random() < 0.1:
        kind = "reference"  # its path starts at the root of the schema
    if kind == "record":
        return _record(rng, depth)
    if kind == "array":
        least = rng.randrange(3)
        return {
            "type": "array",
            "items": random_schema(rng, rng.randrange(depth)),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    if kind == "union":
        return {"anyOf": [random_schema(rng, rng.randrange(depth)) for _ in range(rng.randint(1, 3))]}
    if kind == "map":
        free = random_schema(rng, rng.randrange(depth))
        keys = {"patternProperties": {random_pattern(rng): free}, "additionalProperties": False}
        return {"type": "object", "maxProperties": rng.randint(1, 3)} | rng.choice(
            [keys, {"additionalProperties": free}]
        )
    if kind == "reference":
        name = re.sub("[/~%#]", "", random_text(rng)) or "ß"
        items = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "minItems": 1, "maxItems": 2}
        return items | {"$defs": {name: _record(rng, 1)}}
    return _value(rng)


def _record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = list({random_text(rng, 0, 6): None for _ in range(rng.randint(1, 4))})
    properties = {name: random_schema(rng, rng.randrange(depth)) for name in names}
    actual = {"type": "object", "properties": properties, "required": [each for each in names if rng.random() < 0.7]}
    free = rng.choice([None, False, False, True, {"type": "integer"}])
    return actual if free is None else actual | {"additionalProperties": free}


def _value(rng: random.Random) -> dict[str, Any]:
    least = rng.randrange(4)
    return rng.choice(
        [
            {"enum": [random_value(rng) for _ in range(rng.randint(1, 4))]},
            {"type": "string", "enum": [random_text(rng, 0, 6) for _ in range(rng.randint(1, 3))]},
            {"const": random_value(rng)},
            {"type": "string", "pattern": random_pattern(rng)},
            {"type": "string", "pattern": random_pattern(rng)},
            {"type": "string"},
            {"type": "string", "minLength": least, "maxLength": least + rng.randrange(5)},
            {"type": ["string", "null"], "minLength": 1},
            {"type": "integer", "minimum": rng.randint(-20, 3), "maximum": rng.choice([3, 99, 12345])},
            {"type": "number"},
            {"type": "number", "minimum": -1.5, "maximum": 20},
            {"type": ["boolean", "null"]},
        ]
    )


class Path(NamedTuple):
    """A constraint that contains a schema, and where its JSON is in a text.

    Attributes:
        prefix: text that a random text begins with.
        head, tail: text around each JSON value; empty if the text consists of one.
    """

    constraint: ConstraintConfig
    prefix: str = ""
    head: str = ""
    tail: str = ""

    def values(self, text: str) -> list[Any]:
        """Return the JSON values in a text; raise ValueError if anything else is where one must be."""
        if not self.head or self.head not in text:
            return [json.loads(text[len(self.prefix) :])]
        results, decoder, place = [], json.JSONDecoder(), text.find(self.head)
        while place >= 0:
            value, place = decoder.raw_decode(text, place + len(self.head))
            if not text.startswith(self.tail, place):
                raise ValueError(f"{self.tail!r} is not at {place} of {text!r}")
            results.append(value)
            place = text.find(self.head, place)
        return results


THINK, TAG = "<think>ß1</think>\n", ("<tç😀>", "</é1>")


def _tag(schema: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": TAG[0], "content": {"type": "json_schema", "json_schema": schema}, "end": TAG[1]}


def _structural(part: dict[str, Any], **options: Any) -> ConstraintConfig:
    return ConstraintConfig(structural_tag={"type": "structural_tag", "format": part}, **options)


def _tools(schema: Any, tool_format: str, text: ConstraintConfig | None = None) -> ConstraintConfig:
    """Return the constraint of a chat with a tool, which must be called unless the answer may be `text`."""
    tool = {"type": "function", "function": {"name": "store", "parameters": schema}}
    return _chat(tool_format, ToolUse([tool], must_call=text is None, is_parallel=True), text)


def _chat(tool_format: str, use: ToolUse, text: ConstraintConfig | None) -> ConstraintConfig:
    actual = ChatFormat("", tool_format).constraint(use, text, "")
    assert actual is not None
    return actual


def _response(schema: Any) -> ConstraintConfig:
    return ConstraintConfig(json_schema=schema)


def _tool_path(name: str) -> Callable[[Any], Path]:
    """Return a function that makes the path of a forced call whose arguments are one JSON object."""
    head, _, tail = FORMATS[name].call.replace("$NAME", "store").partition("$ARGS")
    head = re.split(r"\$INDEX|\$ID", head)[-1]
    return lambda schema: Path(_tools(schema, name), ANALYSIS if name == "harmony" else "", head, tail)


def _either_path(schema: Any) -> Path:
    """Return the path of an answer that is either calls or text in a response format."""
    either = _tools(schema, "hermes", _response(schema))
    return _tool_path("hermes")(schema)._replace(constraint=either)


ANALYSIS = "<|channel|>analysis<|message|>ß1<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TOOL_FORMATS = [name for name, form in FORMATS.items() if form.style is None]
PATHS: dict[str, Callable[[Any], Path]] = {
    "response_format": lambda schema: Path(_response(schema)),
    "any whitespace": lambda schema: Path(ConstraintConfig(json_schema=schema, whitespace="any")),
    "after reasoning": lambda schema: Path(
        ConstraintConfig(json_schema=schema, reasoning_begin="<think>", reasoning_end="</think>"), THINK
    ),
    "structural tag": lambda schema: Path(_structural(_tag(schema)), "", *TAG),
    "any whitespace in a tag": lambda schema: Path(_structural(_tag(schema), whitespace="any"), "", *TAG),
    "triggered tag": lambda schema: Path(
        _structural({"type": "triggered_tags", "triggers": ["<tç"], "tags": [_tag(schema)], "at_least_one": True}),
        "",
        *TAG,
    ),
    "format next to tools": _either_path,
    "harmony": lambda schema: Path(_chat("harmony", ToolUse(), _response(schema)), ANALYSIS, FINAL),
    **{f"tool of {name}": _tool_path(name) for name in TOOL_FORMATS},
}


@functools.cache
def texts_of(vocabulary: Vocabulary) -> list[bytes]:
    """Return the texts of a vocabulary's tokens."""
    return list(vocabulary.info.decoded_vocab)


def random_tokens(guide: GrammarGuide, vocabulary: Vocabulary, prefix: str, rng: np.random.Generator) -> list[int]:
    """Return random tokens that a constraint allows, after those of `prefix`, up to the end of the text."""
    actual = vocabulary.spell(prefix.encode(), len(prefix.encode()))
    guide.advance(actual)
    closing = np.array([text[:1] in (b'"', b"}", b"]", b",") for text in texts_of(vocabulary)])
    short = np.array([len(text) == 1 for text in texts_of(vocabulary)])
    for number in range(MAX_TOKENS):
        masks = guide.masks(np.zeros(1, np.int64), np.full(1, -1), 0, [0])
        is_allowed = np.unpackbits(masks.view(np.uint8), bitorder="little")[: len(closing)].astype(bool)
        may_end = is_allowed[guide.ends].any()
        is_allowed[guide.ends] = False
        is_late = number > LATE
        if may_end and (is_late or not is_allowed.any() or rng.random() < 0.5):
            return actual
        if (is_allowed & closing).any() and (is_late or rng.random() < 0.15):
            is_allowed &= closing
        elif is_late and (is_allowed & short).any():
            is_allowed &= short
        actual.append(int(rng.choice(np.flatnonzero(is_allowed))))
        guide.advance(actual[-1:])
    raise AssertionError(f"no end after {MAX_TOKENS} tokens")
