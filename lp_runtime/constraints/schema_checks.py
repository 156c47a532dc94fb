"""A check that a grammar can express a JSON schema, so that text of the grammar satisfies the schema."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard

from lp_runtime.constraints.exact_regexes import may_match_one_text
from lp_runtime.errors import ConstraintError

# Keywords that xgrammar's grammars cannot express.
UNSUPPORTED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
    "additionalItems",
    "uniqueItems",
)
SHAPES = ("pattern", "format")  # of strings; xgrammar would ignore limits of length next to them
# Keywords next to which xgrammar would ignore a schema's other assertions.
COMBINATIONS = ("$ref", "anyOf", "oneOf", "allOf")
ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "nullable",
    "discriminator",
    "strict",
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "components",
)
LEAST, MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")  # limits of numbers
SIZES = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
# The keywords that limit the values of a type.
LIMITS = {
    "number": (*LEAST, *MOST),
    "array": SIZES[1],
    "object": (*SIZES[2], "propertyNames", "patternProperties"),
    "string": (*SIZES[0], *SHAPES),
}
MAX_MULTIPLES_RANGE = 10_000  # integers among which xgrammar looks for multiples


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and value % 1 == 0,
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def refusal(place: str, reason: str) -> ConstraintError:
    """Return the error that refuses the schema at a place (JSON pointer)."""
    return ConstraintError(f"constraint.json_schema: {place}: {reason}")


def check_schema(place: str, schema: Mapping[str, Any]) -> None:
    """Check that a grammar can express a schema, without those inside it; there are three known gaps.

    `oneOf` is treated as `anyOf`; `format` checks only the syntax: 2026-02-30 counts as a date; a key that is not
    declared may occur twice, and counts twice for `minProperties`.
    """
    check_keywords(place, schema)
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) != 1:
        raise refusal(f"{place}/allOf", "is supported with one schema only")
    combination = next((name for name in COMBINATIONS if name in schema), None)
    if combination is not None:
        _refuse_together(place, schema, combination, lambda name: name not in ANNOTATIONS)
    for shape in SHAPES:
        if shape in schema:
            _refuse_together(place, schema, shape, lambda name: name in (*SHAPES, "minLength", "maxLength"))
    _check_type(place, schema)
    _check_required(place, schema)
    check_limits(place, schema)
    if not isinstance(schema.get("format", ""), str):
        raise refusal(f"{place}/format", f"{schema['format']!r} is not a string")
    _check_values(place, schema)
    _check_keys(place, schema)
    _check_multiple(place, schema)


def check_keywords(place: str, schema: Mapping[str, Any]) -> None:
    """Refuse the keywords that no grammar expresses, in JSON or in another syntax."""
    for name in UNSUPPORTED:
        if schema.get(name, False) is not False:
            raise refusal(f"{place}/{name}", "is not supported")


def check_limits(place: str, schema: Mapping[str, Any]) -> None:
    """Check that some value satisfies a schema's limits."""
    for name in (*LEAST, *MOST, "multipleOf"):
        if name in schema and not _is_number(schema[name]):
            raise refusal(f"{place}/{name}", f"{schema[name]!r} is not a number")
    for name in itertools.chain(*SIZES):
        size = schema.get(name, 0)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise refusal(f"{place}/{name}", f"{size!r} is not an integer of at least 0")
    for least, most in (("minimum", "maximum"), *SIZES):
        if schema.get(least, 0) > schema.get(most, schema.get(least, 0)):
            raise refusal(f"{place}/{least}", f"{schema[least]} is more than {most}={schema[most]}")
    for name, described, others in (
        ("minItems", "prefixItems", ("items", "unevaluatedItems")),
        ("minProperties", "properties", ("additionalProperties", "unevaluatedProperties")),
    ):
        num, size = num_in(schema, described), schema.get(name, 0)
        is_closed = any(schema.get(each) is False for each in others) and not schema.get("patternProperties")
        if is_closed and size > num:
            raise refusal(f"{place}/{name}", f"{size} is more than the {num} that {described} and {others[0]} allow")
    num_required = num_in(schema, "required")
    if num_required > schema.get("maxProperties", num_required):
        reason = f"{schema['maxProperties']} is less than the {num_required} properties that are required"
        raise refusal(f"{place}/maxProperties", reason)


def num_in(schema: Mapping[str, Any], name: str) -> int:
    """Return how many entries a keyword of a schema has; 0 if it is missing or malformed."""
    return len(value) if isinstance(value := schema.get(name), list | Mapping) else 0


def check_reference(place: str, schema: Mapping[str, Any], places: Collection[str]) -> None:
    """Check that `$ref` is one of `places`: xgrammar ignores it, or uses a schema that was not checked."""
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or reference not in places:
        raise refusal(f"{place}/$ref", f"{reference!r} is not the place of a schema in this one, such as #/$defs/NAME")


def _refuse_together(place: str, schema: Mapping[str, Any], keyword: str, excludes: Callable[[str], bool]) -> None:
    excluded = next((name for name in schema if name != keyword and excludes(name)), None)
    if excluded is not None:
        raise refusal(f"{place}/{excluded}", f"is not supported together with {keyword}")


def named_types(schema: Mapping[str, Any]) -> list[Any]:
    """Return the types that a schema names; empty if it names none."""
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _check_type(place: str, schema: Mapping[str, Any]) -> None:
    types = named_types(schema)
    if "type" in schema and (not types or not all(isinstance(each, str) and each in TYPES for each in types)):
        raise refusal(f"{place}/type", f"{schema['type']!r} is not one or more of {', '.join(TYPES)}")


def _check_values(place: str, schema: Mapping[str, Any]) -> None:
    """Check `enum` and `const`: values must match `type`, and no other assertion may come next to them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return
    name = "enum" if "enum" in schema else "const"
    _refuse_together(place, schema, name, lambda each: each not in ("type", *ANNOTATIONS))
    types = named_types(schema) or list(TYPES)
    for value in values:
        if not any(TYPES[each](value) for each in types):
            raise refusal(f"{place}/{name}", f"{value!r} is not of type {' or '.join(types)}")


def _check_multiple(place: str, schema: Mapping[str, Any]) -> None:
    """Check `multipleOf`, which xgrammar ignores for other numbers and for many."""
    if "multipleOf" not in schema:
        return
    least, most = ([schema[name] for name in limits if name in schema] for limits in (LEAST, MOST))
    is_small = bool(least and most) and min(most) - max(least) < MAX_MULTIPLES_RANGE
    if schema.get("type") != "integer" or not (is_small or least == most == []):
        reason = f"is supported for integers, with limits that are less than {MAX_MULTIPLES_RANGE} apart or without any"
        raise refusal(f"{place}/multipleOf", reason)


def _check_required(place: str, schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        raise refusal(place, "properties must be an object, and required a list")
    missing = next((name for name in required if name not in properties), None)
    if missing is not None:
        raise refusal(f"{place}/required", f"{missing!r} is not among the properties")


def _check_keys(place: str, schema: Mapping[str, Any]) -> None:
    """Check that no schema of other keys applies to declared properties, where xgrammar would ignore it."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for keyword in ("properties", "patternProperties"):
        if schema.get(keyword) and "propertyNames" in schema:
            raise refusal(f"{place}/propertyNames", f"is not supported together with {keyword}")
    for pattern in patterns if isinstance(patterns, Mapping) else ():
        name = next((name for name in properties if _may_match(pattern, name)), None)
        if name is not None:
            reason = f"applies to the property {name!r}, too, which is not supported"
            raise refusal(f"{place}/patternProperties/{pattern}", reason)
    if isinstance(patterns, Mapping):
        _check_patterns(f"{place}/patternProperties", patterns)


def _check_patterns(place: str, patterns: Mapping[str, Any]) -> None:
    """Check that no key matches two patterns with different schemas: xgrammar would apply only one of them."""
    for (one, schema), (other, its_schema) in itertools.combinations(patterns.items(), 2):
        if schema != its_schema and may_match_one_text(one, other):
            raise refusal(f"{place}/{other}", f"may apply to keys of {one!r}, too, which is not supported")


def _may_match(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:  # ECMAScript's syntax has more escapes
        return True
