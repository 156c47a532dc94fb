"""A walk through the schemas inside a JSON schema, and what references in it name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from lp_runtime.constraints.schema_checks import refusal

# Where schemas are inside a schema: in mappings, in lists, or directly. OpenAPI has them in components/schemas.
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "schemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "components")
Schemas = dict[str, object]  # the schemas inside a schema, by their places (JSON pointers)
MAX_DEPTH = 100  # nesting of schemas
DEFINITIONS = "$defs"


def rewritten(
    schema: object,
    rewrite: Callable[[dict[str, Any]], None] = lambda schema: None,
    check: Callable[[str, Mapping[str, Any]], None] = lambda place, schema: None,
    schemas: Schemas | None = None,
) -> object:
    """Return a copy of a schema with `rewrite` applied to it and those inside; `check` sees them before.

    The copies are added to `schemas`, with schemas that are true or false.
    """
    copies: Schemas = {} if schemas is None else schemas

    def inner(schema: object, place: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise refusal(place[:200], f"is nested deeper than {MAX_DEPTH}")
        if not isinstance(schema, Mapping):
            copies[place] = schema
            return schema
        check(place, schema)
        copy = dict(schema)
        for name in copy:
            value, here = copy[name], f"{place}/{name}"
            if name in MAPPINGS and isinstance(value, Mapping):
                copy[name] = {key: inner(each, f"{here}/{_escaped(key)}", depth + 1) for key, each in value.items()}
            elif name in LISTS and isinstance(value, list):
                copy[name] = [inner(each, f"{here}/{number}", depth + 1) for number, each in enumerate(value)]
            elif name in SINGLES:
                copy[name] = inner(value, here, depth + 1)
        rewrite(copy)
        copies[place] = copy
        return copy

    return inner(schema, "#", 0)


def resolved(reference: str, root: object) -> object:
    """Return the schema that a reference such as #/$defs/NAME names; None if there is none."""
    start, *parts = unquote(reference).split("/")
    node = root if start in ("#", "") else None  # an anchor or another document
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, Mapping) else None
    return node


def with_plain_references(schema: object) -> object:
    """Return a schema in which xgrammar can follow every reference that names a part of it.

    xgrammar reads no escapes, and this package's checks see the places of schemas only (`rewritten`). What is elsewhere
    becomes a definition of a plain name.
    """
    places: Schemas = {}
    root = rewritten(schema, schemas=places)
    names: dict[str, str] = {}
    definitions: dict[str, object] = {}
    waiting = list(places.values())
    for each in waiting:  # grows
        reference = each.get("$ref") if isinstance(each, dict) else None
        if not isinstance(each, dict) or not isinstance(reference, str):
            continue
        reference = unquote(reference)
        is_plain = reference in places and "~" not in reference
        if (
            not is_plain
            and reference not in names
            and isinstance(target := resolved(reference, schema), Mapping | bool)
        ):
            names[reference] = _new_name(schema, len(names))
            inner: Schemas = {}
            definitions[names[reference]] = rewritten(target, schemas=inner)
            waiting += inner.values()
        each["$ref"] = f"#/{DEFINITIONS}/{names[reference]}" if reference in names else reference
    if isinstance(root, dict) and definitions:
        known = root.get(DEFINITIONS)
        root[DEFINITIONS] = {**(known if isinstance(known, Mapping) else {}), **definitions}
    return root


def _new_name(schema: object, number: int) -> str:
    """Return a name that no definition of a schema has."""
    names = (f"reference_{each}" for each in itertools.count(number))
    return next(name for name in names if resolved(f"#/{DEFINITIONS}/{name}", schema) is None)


def _escaped(key: str) -> str:
    """Return a key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
