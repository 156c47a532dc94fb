"""Values of arguments that a model writes as plain text, by the schema of their tool."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lp_runtime.constraints.schema_walk import resolved

TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
NUMBERS = frozenset({"integer", "number"})
COMBINATIONS = ("anyOf", "oneOf", "allOf")
TEXT_LIMITS = frozenset({"pattern", "format", "minLength", "maxLength"})
NO_TYPES = frozenset[str]()
MAX_LITERAL_CHARS = 1 << 16  # Python's parser takes seconds and much memory for a long one
MAX_REFERENCES = 32  # followed from one schema


class Parameter(NamedTuple):
    types: frozenset[str] = frozenset()  # JSON types that it may have; none if they are not known
    values: tuple[object, ...] = ()  # values that the schema lists
    has_text_limits: bool = False  # whether the schema limits its texts; then the space around one is not part of it

    @property
    def is_text(self) -> bool:
        """Whether a value is a text, whatever it looks like."""
        return self.types == {"string"} and not self.values

    @property
    def may_be_text(self) -> bool:
        return not self.types or "string" in self.types


def parameter_of(schema: Mapping[str, Any] | None, key: str, is_string: str | None = None) -> Parameter:
    """Return an argument as a tool's schema describes it.

    `is_string` is "true" or "false" if the model writes whether it is a text; else None.
    """
    if is_string == "true":
        return Parameter(frozenset({"string"}))
    root = schema or {}
    properties = root.get("properties")
    known = properties.get(key) if isinstance(properties, Mapping) else None
    if known is None:
        known = root.get("additionalProperties")
    types, parts = _types(known, root, MAX_REFERENCES, {}), list(_parts(known, root))
    values = tuple(value for part in parts for value in _values(part))
    return Parameter(
        types - {"string"} if is_string == "false" else types, values, any(part.keys() & TEXT_LIMITS for part in parts)
    )


def _parts(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, what it refers to and its alternatives, each once."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            if isinstance(reference := part.get("$ref"), str):
                waiting.append(resolved(reference, root))
            for name in COMBINATIONS:
                waiting += _listed(part, name)


def _listed(schema: Mapping[str, Any], name: str) -> list[object]:
    """Return the schemas that a keyword of a schema lists."""
    listed = schema.get(name)
    return listed if isinstance(listed, list) else []


def _values(schema: object) -> list[object]:
    if not isinstance(schema, Mapping):
        return []
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else []


def _types(
    schema: object, root: Mapping[str, Any], num_references: int, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Return the JSON types that a schema allows; none if it does not say.

    `known` has those of schemas by id, so that each is read once, however often others refer to it.
    """
    if not isinstance(schema, Mapping) or not num_references:
        return NO_TYPES
    if id(schema) not in known:
        known[id(schema)] = NO_TYPES  # while it is read: of a schema that refers to itself
        known[id(schema)] = _stated_types(schema, root, num_references, known)
    return known[id(schema)]


def _stated_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], num_references: int, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Return the JSON types that a schema allows; see `_types`."""
    if isinstance(reference := schema.get("$ref"), str):
        return _types(resolved(reference, root), root, num_references - 1, known)
    if values := _values(schema):
        return frozenset(TYPE_NAMES.get(type(value), "") for value in values)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(map(str, declared))
    parts = {
        name: [_types(each, root, num_references - 1, known) for each in _listed(schema, name)] for name in COMBINATIONS
    }
    choices, all_of = [*parts["anyOf"], *parts["oneOf"]], [types for types in parts["allOf"] if types]
    if choices and all(choices):
        all_of.append(frozenset().union(*choices))
    return frozenset.intersection(*(types | NUMBERS if "number" in types else types for types in all_of or [NO_TYPES]))


def json_of(raw: str, parameter: Parameter) -> str:
    """Return plain text as the JSON of a value of a parameter's types, or of a string if it fits none."""
    text = raw.strip()
    as_text = dumped(text if parameter.has_text_limits else raw)
    if parameter.is_text:
        return as_text
    for value in (raw, text):
        if value in parameter.values:
            return dumped(value)
    # Python's literals only if the schema asks for what they give: models write True, and lists with '.
    readers = (_from_json, _from_python) if parameter.types else (_from_json,)
    candidates = (_fitting(text, read, parameter.types) for read in readers)
    return next((written for written in candidates if written is not None), as_text)


def _fitting(text: str, read: Callable[[str], tuple[Any, str]], types: frozenset[str]) -> str | None:
    """Return a text as JSON if it can be read as a value of some types that is not a text."""
    try:
        value, written = read(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    names = {TYPE_NAMES.get(type(value), "")}
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        names |= NUMBERS
    if names & {"string", ""} or (types and not names & types):
        return None
    return str(int(value)) if isinstance(value, float) and types & NUMBERS == {"integer"} else written


def _from_json(text: str) -> tuple[Any, str]:
    return json.loads(text, parse_constant=_refuse), text  # not written again: numbers keep their digits


def _from_python(text: str) -> tuple[Any, str]:
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError("the literal is too long")
    value = ast.literal_eval(text)
    return value, json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
