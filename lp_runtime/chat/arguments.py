"""Values of arguments that a model writes as plain text, by the schema of their tool."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
NO_TYPES = frozenset[str]()
MAX_LITERAL_CHARS = 1 << 16  # Python's parser takes seconds and much memory for a long one
MAX_REFERENCES = 32  # followed from one schema


class Parameter(NamedTuple):
    types: frozenset[str] = frozenset()  # JSON types that it may have; none if they are not known
    values: tuple[object, ...] = ()  # its only values, if the schema lists them

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
    types, values = _types(known, root, MAX_REFERENCES), tuple(_values(known))
    if is_string == "false":
        return Parameter(types - {"string"}, values)
    return Parameter(types, values)


def _values(schema: object) -> list[object]:
    if not isinstance(schema, Mapping):
        return []
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else []


def _types(schema: object, root: Mapping[str, Any], num_references: int) -> frozenset[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping) or not num_references:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(resolved(reference, root), root, num_references - 1)
    if values := _values(schema):
        return frozenset(TYPE_NAMES.get(type(value), "") for value in values)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(map(str, declared))
    return _combined_types(schema, root, num_references)


def _combined_types(schema: Mapping[str, Any], root: Mapping[str, Any], num_references: int) -> frozenset[str]:
    """Return the JSON types that a schema's alternatives and its `allOf` allow; none if they do not say."""
    parts = {name: [_types(each, root, num_references - 1) for each in schema.get(name) or []] for name in COMBINATIONS}
    choices, known = [*parts["anyOf"], *parts["oneOf"]], [types for types in parts["allOf"] if types]
    if choices and all(choices):
        known.append(frozenset().union(*choices))
    return frozenset.intersection(*(types | NUMBERS if "number" in types else types for types in known or [NO_TYPES]))


def resolved(reference: str, root: Mapping[str, Any]) -> object:
    """Return the schema that a reference such as #/$defs/NAME names; None if there is none."""
    node: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def json_of(raw: str, parameter: Parameter) -> str:
    """Return plain text as the JSON of a value of a parameter's types, or of a string if it fits none."""
    text = raw.strip()
    if parameter.is_text or raw in parameter.values:
        return dumped(raw)
    if text in parameter.values:
        return dumped(text)
    # Python's literals only if the schema asks for what they give: models write True, and lists with '.
    readers = (_from_json, _from_python) if parameter.types else (_from_json,)
    candidates = (_fitting(text, read, parameter.types) for read in readers)
    return next((written for written in candidates if written is not None), dumped(raw))


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
