"""Grammars of structural tags, with fixed or any whitespace in JSON.

xgrammar's structural tags allow any whitespace. For fixed whitespace a tag is converted to a Lark grammar over named
Grammars, which are composed without being printed: xgrammar prints U+0080 to U+00FF as escapes that it misreads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from lp_runtime.constraints.exact_grammars import exact_ebnf
from lp_runtime.constraints.exact_regexes import exact_regex
from lp_runtime.constraints.exact_schemas import exact_schema, json_grammar, with_exact_patterns
from lp_runtime.constraints.library import library

Format = Mapping[str, Any]  # a part of a structural tag, of the kind that its `type` names
QUANTIFIERS = {"optional": "?", "plus": "+", "star": "*"}
# Formats whose text does not depend on the end of the tag around them. Tags are among them: they have another end.
INDEPENDENT = ("json_schema", "const_string", "regex", "grammar", "token", "tag", "tags_with_separator")


def structural_tag_grammar(tag: Any, is_fixed: bool) -> Any:
    """Return xgrammar's Grammar of a structural tag (parsed JSON).

    `is_fixed`: whether JSON has fixed whitespace; not in parts that `_FixedWhitespace` does not convert.
    """
    tag, Grammar = _exact(tag), library().Grammar
    if not is_fixed:
        return Grammar.from_structural_tag(tag)
    Grammar.from_structural_tag(_outline(tag))  # raises an error if the tag is not valid
    return _FixedWhitespace().grammar(tag["format"])


def _exact(value: Any) -> Any:
    """Check a structural tag's schemas; rewrite schemas, regular expressions and grammars for xgrammar."""
    if isinstance(value, list):
        return [_exact(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    tag = {name: each if name == "json_schema" else _exact(each) for name, each in value.items()}
    kind = value.get("type")  # xgrammar guesses the format if there is none
    if "json_schema" in value:
        rewrite = exact_schema if _is_json(value) else with_exact_patterns
        tag["json_schema"] = rewrite(value["json_schema"])
    if kind in ("regex", None) and isinstance(value.get("pattern"), str):
        tag["pattern"] = exact_regex(value["pattern"])
    if kind in ("grammar", None) and isinstance(value.get("grammar"), str):
        tag["grammar"] = exact_ebnf(value["grammar"])
    return tag


def _is_json(value: Format) -> bool:
    """Whether a format is a JSON schema of text in JSON, not XML."""
    is_schema = value.get("type") in ("json_schema", None) and "json_schema" in value
    return is_schema and value.get("style", "json") == "json"


def _outline(value: Any) -> Any:
    """Return a structural tag with small schemas in place of its JSON schemas."""
    if isinstance(value, list):
        return [_outline(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    small = {"json_schema": {"type": "null"}} if _is_json(value) else {}
    return {name: each if name == "json_schema" else _outline(each) for name, each in value.items()} | small


class _FixedWhitespace:
    """Converts a structural tag to Lark, whose strings are JSON's; formats become rules or named Grammars."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._grammars: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of rules and Grammars, by the JSON text of their formats
        self._numbers = itertools.count()

    def grammar(self, part: Format) -> Any:
        root = self._name(part)
        return library().Grammar.from_lark("\n".join([f"start: {root}", *self._rules]), named_grammars=self._grammars)

    def _name(self, part: Format) -> str:
        """Return the name of a format's rule or Grammar, converted at its first use."""
        key = json.dumps(part)
        if key not in self._names:
            name = f"{part.get('type', 'part')}_{next(self._numbers)}"
            if (body := self._body(part)) is not None:
                self._rules.append(f"{name}: {body}")
            else:
                self._grammars[name] = self._whole(part)
                name = f"@{name}"
            self._names[key] = name
        return self._names[key]

    def _body(self, part: Format) -> str | None:
        """Return the body of a format's rule; None if xgrammar converts the format as a whole."""
        kind = part.get("type")
        if not _has_json(part) or _is_json(part):
            return None
        if kind == "sequence":
            return " ".join(map(self._name, part["elements"]))
        if kind == "or":
            return " | ".join(map(self._name, part["elements"]))
        if kind in QUANTIFIERS:
            return self._name(part["content"]) + QUANTIFIERS[kind]
        if kind == "repeat":
            most = "" if part["max"] == -1 else part["max"]
            return f"{self._name(part['content'])}{{{part['min']},{most}}}"
        if kind == "tag":
            return self._tag(part)
        return self._tags_with_separator(part) if kind == "tags_with_separator" else None

    def _tag(self, part: Format) -> str | None:
        """Return the body of a tag's rule, if the tag is text and what is in it does not depend on its end."""
        begin, content, end = part["begin"], part["content"], part["end"]
        ends = end if isinstance(end, list) else [end]
        if not all(isinstance(each, str) for each in (begin, *ends)) or not _is_independent(content):
            return None
        return f"{json.dumps(begin)} {self._name(content)} ({' | '.join(map(json.dumps, ends))})"

    def _tags_with_separator(self, part: Format) -> str:
        tags = f"({' | '.join(self._name({**each, 'type': 'tag'}) for each in part['tags'])})"
        more = "" if part.get("stop_after_first", False) else f" ({json.dumps(part['separator'])} {tags})*"
        body = tags + more
        return body if part.get("at_least_one", False) else f"({body})?"

    def _whole(self, part: Format) -> Any:
        """Return the Grammar of a format that is not converted: a JSON schema, or one with any whitespace."""
        if _is_json(part) and set(part) <= {"type", "style", "json_schema", "any_order"}:
            return json_grammar(part["json_schema"], False, part.get("any_order", False))
        return library().Grammar.from_structural_tag({"type": "structural_tag", "format": part})


def _has_json(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_json, value))
    if not isinstance(value, Mapping):
        return False
    return _is_json(value) or any(_has_json(each) for name, each in value.items() if name != "json_schema")


def _is_independent(part: Format) -> bool:
    """Whether a format's text does not depend on the end of the tag around it, as free text does."""
    kind = part.get("type")
    if kind in ("sequence", "or"):
        return all(map(_is_independent, part["elements"]))
    return _is_independent(part["content"]) if kind in (*QUANTIFIERS, "repeat") else kind in INDEPENDENT
