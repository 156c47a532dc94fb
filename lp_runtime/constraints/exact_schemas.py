"""JSON schemas, rewritten so that every text of xgrammar's grammar satisfies them.

docs/decisions/constraints.md lists where xgrammar 0.2.8's grammars allow more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lp_runtime.constraints.exact_numbers import mark_numbers
from lp_runtime.constraints.exact_regexes import UNESCAPED_IN_JSON, automaton_regex, exact_regex
from lp_runtime.constraints.grammar_checks import has_automaton
from lp_runtime.constraints.library import library
from lp_runtime.constraints.schema_checks import (
    COMBINATIONS,
    LEAST,
    LIMITS,
    MOST,
    TYPES,
    check_keywords,
    check_limits,
    check_reference,
    check_schema,
    named_types,
    num_in,
    refusal,
)
from lp_runtime.constraints.schema_walk import MAX_DEPTH, Schemas, rewritten, with_plain_references

# Keywords of strings and numbers, which xgrammar ignores without a type.
TYPED = (*("pattern", "format", "minLength", "maxLength"), *LEAST, *MOST)
# Keywords of arrays and objects from which xgrammar infers the type, and others, which it ignores without a type.
OF_ITEMS = ("items", "prefixItems", "unevaluatedItems")
OF_KEYS = ("properties", "additionalProperties", "unevaluatedProperties")
UNINFERRED = ("minItems", "maxItems", "minProperties", "maxProperties", "patternProperties", "propertyNames")
# Patterns of the formats whose texts xgrammar does not escape: they would allow quotes and control characters.
FORMATS = {
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
}
ANY_TEXT = r"[\s\S]*"
NO_SYNTAX = r"[^<>\"\\\x00-\x1f]*"  # text that ends neither an XML element nor JSON's string
# Characters of a string up to which an automaton counts them; the time to build it grows with the square.
MAX_AUTOMATON_LENGTH = 100


def exact_schema(schema: object) -> object:
    """Check that a grammar can express a schema (parsed JSON), and rewrite it for xgrammar; see `with_numbers`."""
    schemas: Schemas = {}
    whole = rewritten(with_plain_references(schema), _rewrite_for_json, check_schema, schemas)
    inner = [(place, each) for place, each in schemas.items() if isinstance(each, dict)]
    for place, each in inner:
        check_reference(place, each, schemas)
    for place, each in inner:
        _rewrite_names(each, place, schemas)
    for _, each in inner:
        _mark_numbers(each)
    return whole


def with_exact_patterns(schema: object) -> object:
    """Check a schema whose text is not JSON, and rewrite what xgrammar reads otherwise."""

    def check(place: str, schema: Mapping[str, Any]) -> None:
        check_keywords(place, schema)
        check_limits(place, schema)

    def rewrite(schema: dict[str, Any]) -> None:
        _add_type(schema)
        _rewrite_free_contents(schema)
        _rewrite_patterns(schema, lambda pattern: exact_regex(pattern, free=NO_SYNTAX))
        _mark_numbers(schema)

    schemas: Schemas = {}
    whole = rewritten(with_plain_references(schema), rewrite, check, schemas)
    for place, each in schemas.items():
        if isinstance(each, dict):
            check_reference(place, each, schemas)
    return whole


def _add_type(schema: dict[str, Any]) -> None:
    """Name the type of a schema's limits: values without quotes would fit the limits of one type as another one."""
    if any(name in schema for name in ("type", "enum", "const", *COMBINATIONS, *OF_ITEMS, *OF_KEYS)):
        return
    kind = next((kind for kind, names in LIMITS.items() if any(name in schema for name in names)), None)
    if kind is not None:
        schema["type"] = kind


def json_grammar(schema: object, is_any_whitespace: bool, any_order: bool = False) -> Any:
    return library().Grammar.from_json_schema(
        json.dumps(schema), any_whitespace=is_any_whitespace, strict_mode=True, any_order=any_order
    )


def _rewrite_for_json(schema: dict[str, Any]) -> None:
    is_inferred = any(name in schema for name in (*OF_ITEMS, *OF_KEYS))
    if "type" not in schema and any(name in schema for name in (TYPED if is_inferred else (*TYPED, *UNINFERRED))):
        schema["type"] = list(TYPES)
    _rewrite_free_contents(schema)
    _rewrite_patterns(schema, _in_json)
    _rewrite_lengths(schema)
    _rewrite_free_keys(schema)


def _rewrite_free_contents(schema: dict[str, Any]) -> None:
    """Name a schema for free items and keys, which xgrammar forbids next to other keywords, such as maxItems.

    Also for those that a limit needs in addition to the described ones.
    """
    types = named_types(schema)
    is_array = "array" in types and "prefixItems" not in schema
    num = num_in(schema, "prefixItems")
    if (is_array or schema.get("minItems", 0) > num > 0) and not {"items", "unevaluatedItems"} & schema.keys():
        schema["items"] = {}
    is_object = "object" in types and "properties" not in schema
    num = num_in(schema, "properties")
    others = {"additionalProperties", "unevaluatedProperties", "propertyNames"} & schema.keys()
    if (is_object or schema.get("minProperties", 0) > num > 0) and not others and not schema.get("patternProperties"):
        schema["additionalProperties"] = True


def _rewrite_names(schema: dict[str, Any], place: str, schemas: Schemas) -> None:
    """Limit `propertyNames` to strings, and drop it if no key is allowed: xgrammar would allow keys of other types."""
    if "propertyNames" not in schema:
        return
    names = _strings_of(schema["propertyNames"], f"{place}/propertyNames", schemas)
    if names is False or schema.get("additionalProperties", schema.get("unevaluatedProperties")) is False:
        for name in ("propertyNames", "unevaluatedProperties"):
            schema.pop(name, None)
        schema["additionalProperties"] = False
    else:
        schema["propertyNames"] = names


def _strings_of(schema: object, place: str, schemas: Schemas, depth: int = 0) -> object:
    """Return a schema of the strings that a rewritten schema allows, without references; False if there are none."""
    if depth > MAX_DEPTH:
        raise refusal(place, "refers to itself")
    if not isinstance(schema, Mapping):
        return {"type": "string"} if schema is True else schema
    if "$ref" in schema:
        return _strings_of(schemas[schema["$ref"]], place, schemas, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            choices = [_strings_of(each, place, schemas, depth + 1) for each in schema[name]]
            choices = [each for each in choices if each is not False]
            return {name: choices} if choices else False
    if "type" in schema and "string" not in named_types(schema):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return {**schema, "type": "string"}
    strings = [each for each in values if isinstance(each, str)]
    return {"enum": strings} if strings else False


def _mark_numbers(schema: dict[str, Any]) -> None:
    """Mark numbers in `enum` and `const`; the grammar needs `with_numbers`."""
    for name in ("enum", "const"):
        if name in schema and (marked := mark_numbers(schema[name])) != schema[name]:
            schema[name] = marked
            schema.pop("type", None)  # is checked, and that of a marked number is another


def _rewrite_patterns(schema: dict[str, Any], rewrite: Callable[[str], str]) -> None:
    """Rewrite patterns, which JSON Schema searches for, to expressions of whole texts."""
    if schema.get("format") in FORMATS:
        schema["pattern"] = FORMATS[schema.pop("format")]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = f"^{rewrite(schema['pattern'])}$"
    if isinstance(schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {f"^{rewrite(key)}$": each for key, each in schema["patternProperties"].items()}


def _in_json(pattern: str) -> str:
    """Return a pattern of the matches of `pattern` that hold no escape; xgrammar allows quotes, too."""
    rewritten = automaton_regex(pattern, ANY_TEXT)
    if has_automaton(json_grammar({"type": "string", "pattern": rewritten}, False)):
        return rewritten
    return exact_regex(pattern, UNESCAPED_IN_JSON, ANY_TEXT)


def _rewrite_lengths(schema: dict[str, Any]) -> None:
    """Replace limits of a string's length, next to which xgrammar allows control characters, by a pattern."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    limits = [each for each in (least, most) if each is not None]
    if limits == [0] or not all(isinstance(each, int) and each >= 0 for each in limits) or limits != sorted(limits):
        return  # no limits, or such that xgrammar refuses
    character = r"[\s\S]"
    is_short = limits[-1] <= MAX_AUTOMATON_LENGTH
    character = automaton_regex(character) if is_short else exact_regex(character, UNESCAPED_IN_JSON)
    schema.pop("minLength", None)
    schema.pop("maxLength", None)
    schema["pattern"] = f"^{character}{{{least},{'' if most is None else most}}}$"


def _rewrite_free_keys(schema: dict[str, Any]) -> None:
    """Replace the schema of undeclared keys by one for a pattern of all keys that are not declared.

    xgrammar allows declared keys again, if they have characters outside ASCII or are escaped.
    """
    if not isinstance(schema.get("properties"), Mapping) or not schema["properties"]:
        return
    free = schema.pop("unevaluatedProperties", False)
    free = schema.get("additionalProperties", free)
    if free is False:
        return
    schema["additionalProperties"] = False
    if not schema.get("patternProperties"):
        schema["patternProperties"] = {automaton_regex(f"^{_others(schema['properties'])}$"): free}


def _others(texts: Iterable[str]) -> str:
    """Return a regular expression of all texts except the given ones."""
    rests: dict[str, list[str]] = {}  # by the first character
    is_excluded = False
    for text in texts:
        if text:
            rests.setdefault(f"\\u{{{ord(text[0]):x}}}", []).append(text[1:])
        else:
            is_excluded = True
    other = f"[^{''.join(rests)}][\\s\\S]*" if rests else r"[\s\S]+"
    choices = [other, *(first + _others(each) for first, each in rests.items())]
    return f"(?:{'|'.join(choices)})" + ("" if is_excluded else "?")
