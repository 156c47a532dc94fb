"""Requests with every field of every route, made from the body classes, for tests and the fuzzer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from lp_runtime.server.anthropic.messages_api import Messages
from lp_runtime.server.openai.protocol import Chat, Completion, Detokenize, Tokenize
from lp_runtime.server.openai.responses_api import Responses
from support.fuzz_cases import CHAT, COMPLETIONS, GOOD, LIMITS, MESSAGES, RESPONSES, HttpCase, any_value, request
from support.serving import TOOLS_TEMPLATE

# Renders tools, may open a reasoning part, and has the markers of both.
FIELDS_TEMPLATE = TOOLS_TEMPLATE + "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
# Samples of one prompt are decoded one after another, and have to end within HANG_SECONDS.
FIELDS_LIMITS = LIMITS | {"strict_fields": False, "max_new_tokens": 32, "max_waiting": 7}
TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", f"{MESSAGES}/count_tokens"
COUNT_INPUT = f"{RESPONSES}/input_tokens"
BODIES: dict[str, type[BaseModel]] = {
    COMPLETIONS: Completion,
    CHAT: Chat,
    RESPONSES: Responses,
    MESSAGES: Messages,
    TOKENIZE: Tokenize,
    DETOKENIZE: Detokenize,
    COUNT: Messages,
    COUNT_INPUT: Responses,
}
GOOD_BODIES = GOOD | {TOKENIZE: {"prompt": "x"}, DETOKENIZE: {"tokens": [5]}, COUNT: GOOD[MESSAGES]}
GOOD_BODIES |= {COUNT_INPUT: GOOD[RESPONSES]}
# Strings that have a meaning in some field.
TEXTS = ("x", "f", "user", "assistant", "tool", "developer", "none", "auto", "high", '{"a": 1}', "<think>", "</think>")
TEXTS += ("<tool_call>", "demo", "")
WRONG = 0.15  # probability that a part of a value is replaced by any JSON value


class FieldValues:
    """Random values of fields, by the JSON schema of their body.

    Args:
        schema: pydantic's, of the body.
        rng: source of all choices.
    """

    def __init__(self, schema: Mapping[str, Any], rng: random.Random):
        self._definitions, self._rng = schema.get("$defs", {}), rng

    def of(self, schema: Mapping[str, Any], depth: int = 5) -> Any:
        """Return a value that follows a schema, with WRONG parts in it."""
        rng = self._rng
        if depth <= 0 or rng.random() < WRONG:
            return any_value(rng)
        if "$ref" in schema:
            return self.of(self._definitions[schema["$ref"].rpartition("/")[2]], depth)
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return self.of(rng.choice(choices), depth)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum", [schema.get("const")]))
        return self._plain(schema, depth)

    def _plain(self, schema: Mapping[str, Any], depth: int) -> Any:
        """Return a value of a schema's type."""
        rng, kind = self._rng, schema.get("type")
        if kind == "object":
            known = schema.get("properties", {})
            shown = [name for name in known if name in schema.get("required", ()) or rng.random() < 0.5]
            return {name: self.of(known[name], depth - 1) for name in shown}
        if kind == "array":
            return [self.of(schema.get("items", {}), depth - 1) for _ in range(rng.randrange(1, 4))]
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", 0), schema.get("maximum", 8)
            return rng.randint(low, high) if kind == "integer" else rng.choice((0, 0.5, 1, 1.5))
        values = {"boolean": (True, False), "string": TEXTS, "null": (None,)}
        return rng.choice(values[kind]) if kind in values else any_value(rng)


def field_cases(count: int, seed: int = 0) -> Iterator[HttpCase]:
    """Yield requests with every field of every body in turn, together with up to three others."""
    rng = random.Random(seed)
    bodies = {path: body.model_json_schema() for path, body in BODIES.items()}
    turns = [(path, name) for path, schema in bodies.items() for name in schema["properties"]]
    rng.shuffle(turns)
    for number in range(count):
        path, name = turns[number % len(turns)]
        values, fields = FieldValues(bodies[path], rng), bodies[path]["properties"]
        others = rng.choices(list(fields), k=rng.randrange(4))
        body = GOOD_BODIES[path] | {each: values.of(fields[each]) for each in (name, *others)}
        yield HttpCase("derived", request(path, json.dumps(body).encode()), may_pass=True)
