"""Settings of a constraint on the new text of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Optional

from lp_runtime.config.checks import is_list, is_unicode, require_choice
from lp_runtime.errors import ConstraintError

KINDS = ("json_schema", "regex", "grammar", "choice", "structural_tag")
WHITESPACES = ("fixed", "any")
BYTE_ORDER_MARK = "\ufeff"  # begins the files of some editors
MAX_SOURCE_CHARS = 1 << 18  # of a constraint's text; compile time and memory grow with it


@dataclass
class ConstraintConfig:
    """A constraint on the new text of a request.

    At most one kind is given; without any, every text is allowed.

    Needs the package xgrammar (the extra `constraints`) and a model with an end-of-sequence token.
    """

    json_schema: Any = None
    """JSON schema that the text satisfies, as a mapping or as JSON text; true allows any JSON."""
    regex: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """Regular expression that the whole text matches."""
    grammar: Optional[str] = None  # noqa: UP045
    """EBNF grammar of the text, in llama.cpp's GBNF format; its first rule is root."""
    choice: Optional[list[str]] = None  # noqa: UP045
    """Allowed texts; the model chooses one of them."""
    structural_tag: Any = None
    """xgrammar's structural tag, as a mapping or as JSON text: free text with constrained parts."""
    whitespace: str = "fixed"
    """Whitespace in JSON: fixed (one space after each comma and colon, so that most of these tokens are certain and can
    be drafted) or any."""
    reasoning_end: Optional[str] = None  # noqa: UP045
    """Text that ends a free part before the constrained one, such as </think>; if not given, there is no free part."""
    reasoning_begin: Optional[str] = None  # noqa: UP045
    """Text that begins the free part, such as <think>; the model may then omit the free part. If not given, the prompt
    has begun it."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConstraintError(f"constraint: {' and '.join(given)} are given; give one of them")
        if isinstance(self.grammar, str):
            self.grammar = self.grammar.removeprefix(BYTE_ORDER_MARK)
        self._check_texts()
        require_choice("constraint.whitespace", self.whitespace, WHITESPACES)
        if given and len(self.source) > MAX_SOURCE_CHARS:
            message = f"has {len(self.source)} characters; must be at most {MAX_SOURCE_CHARS}"
            raise ConstraintError(f"constraint.{given[0]}: {message}")

    def _check_texts(self) -> None:
        for name in ("regex", "grammar", "reasoning_end", "reasoning_begin"):
            value = getattr(self, name)
            if value is not None and not _is_text(value):
                raise ConstraintError(f"constraint.{name}={_cut(value)}: must be a Unicode text, not empty")
        if self.choice is not None and not (is_list(self.choice) and self.choice and all(map(_is_text, self.choice))):
            raise ConstraintError(f"constraint.choice={_cut(self.choice)}: must be a list of Unicode texts, none empty")
        if self.reasoning_begin is not None and self.reasoning_end is None:
            raise ConstraintError(f"constraint.reasoning_begin={self.reasoning_begin!r}: only with reasoning_end")

    @property
    def kind(self) -> str | None:
        """The given kind, one of KINDS; None without a constraint."""
        return next((name for name in KINDS if getattr(self, name) is not None), None)

    @property
    def source(self) -> str:
        """The constraint as text, equal for equal constraints of a kind; ConstraintError if JSON is invalid."""
        kind = self.kind
        assert kind is not None
        value = getattr(self, kind)
        if kind == "choice":
            return json.dumps(list(value))
        return _json_text(kind, value) if kind in ("json_schema", "structural_tag") else value

    @property
    def key(self) -> str:
        """Text that identifies this constraint, its options included; empty without a constraint."""
        if self.kind is None:
            return ""
        others = [getattr(self, item.name) for item in fields(self) if item.name not in KINDS]
        return json.dumps([self.kind, self.source, *others])


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and is_unicode(value)


def _cut(value: object) -> str:
    return repr(value)[:100]


def _json_text(name: str, value: object) -> str:
    """Normalize a JSON value or text to JSON text; raise ConstraintError if it is not an object or bool."""
    try:
        parsed = json.loads(value.removeprefix(BYTE_ORDER_MARK)) if isinstance(value, str) else value
        if not isinstance(parsed, Mapping | bool):
            raise ValueError(f"it is a {type(parsed).__name__}")
        text = json.dumps(parsed, allow_nan=False)
        if not is_unicode(json.dumps(parsed, ensure_ascii=False)):
            raise ValueError("a text in it is not valid Unicode")
        return text
    except (ValueError, TypeError, RecursionError) as error:
        raise ConstraintError(f"constraint.{name}: must be a JSON object, true or false: {error}") from error
