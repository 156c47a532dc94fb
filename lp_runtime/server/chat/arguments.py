"""Values of arguments that a model writes as plain text, by the schema of their tool."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
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
MAX_REFERENCES = 32  # followed from one schema


class Parameter(NamedTuple):
    """What a schema says about an argument: the JSON types that it may have, none if unknown, and its known values."""

    types: frozenset[str] = frozenset()
    values: tuple[object, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether a value is a text, whatever it looks like."""
        return self.types == {"string"} and not self.values

    @property
    def may_be_text(self) -> bool:
        return not self.types or "string" in self.types


def parameter_of(schema: Mapping[str, Any] | None, key: str, is_string: str | None = None) -> Parameter:
    """Return what a tool's schema says about an argument; `is_string` is "true" or "false" if the model says so."""
    if is_string == "true":
        return Parameter(frozenset({"string"}))
    root = schema or {}
    properties = root.get("properties")
    known = properties.get(key) if isinstance(properties, Mapping) else None
    if known is None:
        known = root.get("additionalProperties")
    found, values = _types(known, root, MAX_REFERENCES), tuple(_values(known))
    if is_string == "false":
        return Parameter(found - {"string"}, values)
    return Parameter(found, values)


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
    choices = [_types(each, root, num_references - 1) for name in ("anyOf", "oneOf") for each in schema.get(name) or []]
    return frozenset().union(*choices) if all(choices) else frozenset()


def resolved(reference: str, root: Mapping[str, Any]) -> object:
    """Return the schema that a reference such as #/$defs/NAME names; None if there is none."""
    found: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def json_of(raw: str, parameter: Parameter) -> str:
    """Return plain text as the JSON of a value of a parameter's types; text that fits none of them stays text."""
    text = raw.strip()
    if parameter.is_text or raw in parameter.values:
        return dumped(raw)
    if text in parameter.values:
        return dumped(text)
    # Python's literals only if the schema asks for what they give: models write True, and lists with '.
    for read in (_from_json, _from_python) if parameter.types else (_from_json,):
        try:
            value, written = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        names = {TYPE_NAMES.get(type(value), ""), *(NUMBERS if _is_whole(value) else ())}
        if names.isdisjoint({"string", ""}) and (not parameter.types or names & parameter.types):
            is_integer = isinstance(value, float) and "number" not in parameter.types and bool(parameter.types)
            return str(int(value)) if is_integer else written  # type: ignore[call-overload]
    return dumped(raw)


def _from_json(text: str) -> tuple[object, str]:
    """Return (value, JSON) of a JSON text, which is kept as it is."""
    return json.loads(text, parse_constant=_refuse), text


def _from_python(text: str) -> tuple[object, str]:
    """Return (value, JSON) of a Python literal."""
    value = ast.literal_eval(text)
    return value, json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def dumped(text: str) -> str:
    """Return a text as a JSON string; lone surrogates, which UTF-8 cannot encode, are escaped."""
    return json.dumps(text, ensure_ascii=False)
