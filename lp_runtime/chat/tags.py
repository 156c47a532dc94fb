"""Structural tags (xgrammar's) of tool calls and of reasoning, from the descriptions of formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lp_runtime.chat.formats import CallFormat, ParameterStyle, ReasoningFormat
from lp_runtime.config.constraint import MAX_SOURCE_CHARS, ConstraintConfig
from lp_runtime.constraints.regex_anchors import without_anchors
from lp_runtime.constraints.schema_checks import check_keywords
from lp_runtime.constraints.schema_walk import resolved, rewritten
from lp_runtime.errors import RequestError

Tag = dict[str, Any]

AFTER_REASONING = r"\n{0,2}"
PLAIN_TEXT = "[^<]*"  # without the marks that end a literal
PATTERNS = {"$INDEX": "[0-9]{1,3}", "$ID": "[a-zA-Z0-9]{9}"}
MAX_SPACES = 2  # in a row, between the parts of arguments
MAX_DEPTH = 32  # nesting of a schema whose literals are not JSON
MAX_VALUES = 1 << 11  # of such a schema


def calls(form: CallFormat, schemas: Mapping[str, Mapping[str, Any]], is_parallel: bool) -> Tag:
    """Return the tag of at least one call, and at most one without `is_parallel`.

    `schemas` are those of the tools' arguments, by the tools' names.
    """
    return sequence(
        text(form.begin),
        {
            "type": "tags_with_separator",
            "tags": [_call(form, name, schema) for name, schema in schemas.items()],
            "separator": form.separator or "",
            "at_least_one": True,
            "stop_after_first": not is_parallel or form.separator is None,
        },
        text(form.end),
    )


def _call(form: CallFormat, name: str, schema: Mapping[str, Any]) -> Tag:
    head, _, tail = form.call.replace("$NAME", name).partition("$ARGS")
    begin, *others = re.split(r"(\$INDEX|\$ID)", head)
    parts = [{"type": "regex", "pattern": PATTERNS[part]} if part in PATTERNS else text(part) for part in others]
    content = sequence(*parts, _arguments(form.style, schema))
    return {"type": "tag", "begin": begin, "content": content, "end": tail}


def _arguments(style: ParameterStyle | None, schema: Mapping[str, Any]) -> Tag:
    if style is None:
        return {"type": "json_schema", "json_schema": schema}
    if style.schema_style:
        more = {"style": style.schema_style, "max_whitespace_cnt": MAX_SPACES}
        return {"type": "json_schema", "json_schema": schema, **more}
    rewritten(schema, check=check_keywords)
    return _Literals(schema, style).members(schema, MAX_DEPTH)


class _Literals:
    """Makes the tags of arguments in a style that xgrammar's JSON schemas do not know.

    A schema is read again at each place that refers to it, MAX_VALUES times in all.
    """

    def __init__(self, root: Mapping[str, Any], style: ParameterStyle):
        self._root = root
        self._style = style
        self._num_values = 0  # made so far

    def members(self, schema: Mapping[str, Any], depth: int) -> Tag:
        """Return the tag of an object's members, in the schema's order; those not required may be missing."""
        required, properties = schema.get("required") or [], schema.get("properties") or {}
        if not isinstance(required, list) or not isinstance(properties, Mapping):
            raise RequestError("tools: properties of a schema must be an object, and required a list")
        rest: Tag | None = None  # members after the current one, each after a separator
        starts: list[Tag] = []  # alternatives: which member is the first
        num_chars = 0
        for key, value in reversed(list(properties.items())):
            member = sequence(text(self._style.open.replace("$KEY", key)), self._value(value, depth - 1))
            starts = [sequence(member, rest), *([] if key in required else starts)]
            following = sequence(text(self._style.separator), member)
            rest = sequence(following if key in required else {"type": "optional", "content": following}, rest)
            num_chars += len(json.dumps(member))
            if num_chars * len(starts) > MAX_SOURCE_CHARS:
                raise RequestError(
                    f"tools: a schema with {len(properties)} properties is too large for this tool format"
                )
        if not starts:
            return text("")
        members = _one_of(starts)
        return members if any(key in required for key in properties) else {"type": "optional", "content": members}

    def _value(self, schema: Any, depth: int) -> Tag:
        if not depth:
            raise RequestError(f"tools: a schema is nested deeper than {MAX_DEPTH}, or refers to itself")
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise RequestError(f"tools: a schema has more than {MAX_VALUES} values, counting each reference")
        if not isinstance(schema, Mapping):
            schema = {}
        if isinstance(schema.get("$ref"), str):
            return self._value(resolved(schema["$ref"], self._root), depth - 1)
        if (choices := _choices(schema, self._style)) is not None:
            return _one_of([text(each) if isinstance(each, str) else self._value(each, depth - 1) for each in choices])
        quoted = self._quoted(schema, depth) if len(self._style.quote) > 1 else None
        definitions = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        return quoted or {"type": "json_schema", "json_schema": {**definitions, **schema}}

    def _quoted(self, schema: Mapping[str, Any], depth: int) -> Tag | None:
        """Return the tag of a literal that is, or may have, a text between marks that JSON does not have."""
        kind, quote = schema.get("type"), self._style.quote
        if kind == "string":
            return {"type": "tag", "begin": quote, "content": _characters(schema), "end": quote}
        if kind == "object" and schema.get("properties"):
            return sequence(text("{"), self.members(schema, depth - 1), text("}"))
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            return _items(schema, self._value(schema["items"], depth - 1), self._style)
        return None


def _choices(schema: Mapping[str, Any], style: ParameterStyle) -> list[Any] | None:
    """Return the alternatives of a schema, as literals or schemas; None if it has none."""
    kind, constants = schema.get("type"), {"boolean": [True, False], "null": [None]}
    values = schema.get("enum", [schema["const"]] if "const" in schema else constants.get(str(kind)))
    if values and isinstance(values, list):
        return [_literal(value, style) for value in values]
    for name in ("anyOf", "oneOf"):
        if schema.get(name) and isinstance(schema[name], list):
            return schema[name]
    return [{**schema, "type": each} for each in kind] if kind and isinstance(kind, list) else None


def _characters(schema: Mapping[str, Any]) -> Tag:
    if "pattern" in schema:
        return {"type": "regex", "pattern": _whole_pattern(schema["pattern"])}
    if "minLength" in schema or "maxLength" in schema:
        return {"type": "regex", "pattern": f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"}
    return {"type": "any_text"}


def _whole_pattern(pattern: object) -> str:
    """Return an expression of the whole texts in which JSON Schema finds a pattern."""
    try:
        return without_anchors(str(pattern), PLAIN_TEXT)
    except ValueError as error:
        raise RequestError(f"tools: pattern of a schema: {error}") from error


def _items(schema: Mapping[str, Any], item: Tag, style: ParameterStyle) -> Tag:
    least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
    if not isinstance(least, int) or not isinstance(most, int):
        raise RequestError("tools: minItems and maxItems of a schema must be integers")
    if most == 0:
        return text("[]")
    others = {"type": "repeat", "min": max(least - 1, 0), "max": most - 1 if most > 0 else -1}
    members = sequence(item, {**others, "content": sequence(text(style.separator), item)})
    return sequence(text("["), members if least else {"type": "optional", "content": members}, text("]"))


def _literal(value: object, style: ParameterStyle) -> str:
    if isinstance(value, str) and len(style.quote) > 1:
        return style.quote + value + style.quote
    if len(style.quote) == 1 and (value is None or isinstance(value, bool)):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


# Parts of tags.


def _one_of(elements: list[Tag]) -> Tag:
    return {"type": "or", "elements": elements} if len(elements) > 1 else elements[0]


def text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def sequence(*parts: Tag | None) -> Tag:
    """Return the tag of some parts in a row; empty texts are left out."""
    shown = [part for part in parts if part is not None and part != text("")]
    if len(shown) < 2:
        return shown[0] if shown else text("")
    return {"type": "sequence", "elements": shown}


def free(begin: str, end: str) -> Tag:
    """Return the tag of any text between two marks."""
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


def thought(reasoning: ReasoningFormat, is_open: bool) -> Tag:
    """Return the tag of a reasoning part, which may be missing unless the prompt opened it (`is_open`)."""
    begin = "" if is_open else reasoning.begin
    space = {"type": "regex", "pattern": AFTER_REASONING} if reasoning.hides_space else None
    part = sequence(free(begin, reasoning.end), space)
    return part if is_open else {"type": "optional", "content": part}


def any_or_none(texts: Iterable[str]) -> Tag | None:
    """Return the tag of one of some texts, which may be missing; None if there are no texts."""
    elements = list(map(text, texts))
    return {"type": "optional", "content": _one_of(elements)} if elements else None


def content(constraint: ConstraintConfig) -> Tag:
    kind, source = constraint.kind, constraint.source
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(source)}
    if kind == "structural_tag":
        return json.loads(source)["format"]
    if kind == "choice":
        return {"type": "or", "elements": [text(each) for each in json.loads(source)]}
    return {"type": str(kind), "pattern" if kind == "regex" else "grammar": source}
