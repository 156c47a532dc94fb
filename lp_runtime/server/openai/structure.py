"""OpenAI's response_format and vLLM's structured_outputs, and their conversion to constraints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import ConstraintError
from lp_runtime.server.openai.parts import StrictPart

ANY_OBJECT = {"type": "object"}


class NamedSchema(StrictPart):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictPart):
    """OpenAI's response_format, or text.format of /v1/responses, with the schema's fields next to `type`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def constraint(self) -> ConstraintConfig:
        """Return the constraint; its `kind` is None for plain text."""
        if self.type == "text":
            return ConstraintConfig()
        if self.type == "json_object":
            return ConstraintConfig(json_schema=ANY_OBJECT)
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if schema is None:
            raise ConstraintError("response_format.json_schema.schema: is missing")
        return ConstraintConfig(json_schema=schema)


class StructuredOutputs(StrictPart):
    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = False

    def constraint(self) -> ConstraintConfig:
        """Return the constraint; its `kind` is None if none is given."""
        if self.json_object and self.json_ is not None:
            raise ConstraintError("structured_outputs: json and json_object are given; give one of them")
        return ConstraintConfig(
            json_schema=ANY_OBJECT if self.json_object else self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
            whitespace="fixed" if self.disable_any_whitespace else "any",
        )


def constraint_of(formatted: ResponseFormat | None, outputs: StructuredOutputs | None) -> ConstraintConfig | None:
    """Return the constraint that a body asks for, in at most one of both forms; None without one."""
    asked = [each.constraint() for each in (formatted, outputs) if each is not None]
    given = [each for each in asked if each.kind is not None]
    if len(given) > 1:
        raise ConstraintError("response_format and structured_outputs: give one of them")
    return given[0] if given else None
