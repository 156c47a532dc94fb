"""Tests of constraints of calls with literal arguments, which xgrammar's JSON schemas do not cover."""

from __future__ import annotations

import json

import jsonschema
import pytest
import xgrammar
from support.constrained_texts import INFO, texts_of
from support.tool_answers import parts_of

from lp_runtime.chat.chat_format import ChatFormat, ToolUse
from lp_runtime.constraints.compiled import compile_constraint, load_compiled
from lp_runtime.errors import RequestError

STYLES = ("gemma", "functiongemma", "pythonic")
PROPERTIES = {
    "string": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[ab]{2}c$"},
    "beginning": {"type": "string", "pattern": "^https?://"},
    "constant": {"const": "it's"},
    "numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 2,
        "maxItems": 3,
    },
    "no items": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
    "union": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/deep"}]},
    "object": {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
}


def drawn(name, schema, num=6):
    """Yield the arguments of random calls that follow a schema."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    form = ChatFormat("", name, "none")
    for text in texts_of(form.constraint(ToolUse(tools, True, False), None, ""), num):
        ((_, arguments),) = parts_of(form.parser(tools, ""), [text])[2]
        yield arguments


@pytest.mark.parametrize("name", STYLES)
def test_literal_arguments_follow_their_schemas(name):
    definitions = {"deep": {"type": "object", "properties": {"t": {"type": "string"}}, "additionalProperties": False}}
    for key, value in PROPERTIES.items():
        schema = {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
        schema["$defs"] = definitions
        for arguments in drawn(name, schema):
            jsonschema.validate(arguments, schema)


@pytest.mark.parametrize(
    ("name", "call", "member", "separator"),
    [
        ("gemma", "<|tool_call>call:f{%s}<tool_call|>", '%s:<|"|>%s<|"|>', ","),
        ("pythonic", "[f(%s)]", '%s="%s"', ", "),
    ],
)
@pytest.mark.parametrize("required", ["", "b", "ac"])
def test_optional_members_may_be_missing(name, call, member, separator, required):
    schema = {"properties": {key: {"enum": [key]} for key in "abc"}, "required": list(required)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    compiled = compile_constraint(ChatFormat("", name).constraint(ToolUse(tools, True), None, ""), INFO)
    for keys in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "ba", "aa"):
        matcher = xgrammar.GrammarMatcher(load_compiled(compiled, INFO))
        is_allowed = matcher.accept_string(call % separator.join(member % (key, key) for key in keys))
        is_valid = set(required) <= set(keys) and list(keys) == sorted(set(keys))
        assert (is_allowed and matcher.is_completed()) == is_valid, keys


# Each definition refers twice to the next one, so the first one has 2^14 numbers.
DOUBLING = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(14)} | {"14": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": DOUBLING}, "more than 2048 values"),
        ({"properties": "a"}, "must be an object"),
        ({"properties": {}, "required": 5}, "a list"),
        ({"properties": {"a": {"type": "array", "items": {}, "minItems": "x"}}}, "must be integers"),
        (
            {"properties": {"a": {"type": "string", "pattern": "a^"}}},
            "pattern of a schema: \\^ is supported only where",
        ),
        ({"properties": {f"p{each}": {"enum": ["x" * 99] * 9} for each in range(99)}}, "99 properties is too large"),
    ],
)
def test_bad_schemas_are_refused(schema, message):
    form = ChatFormat("", "gemma", "none")
    with pytest.raises(RequestError, match=message):
        form.constraint(ToolUse([{"function": {"name": "f", "parameters": schema}}], True), None, "")


@pytest.mark.parametrize("keyword", [{"not": {"const": []}}, {"uniqueItems": True}])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "deepseek_v32", "gemma", "pythonic"])
def test_keywords_that_no_grammar_expresses_are_refused_in_all_formats(name, keyword):
    """Arguments would break the schema that a forced call promises to follow."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, **keyword}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(RequestError, match=f"#/properties/a/{next(iter(keyword))}: is not supported"):
        compile_constraint(ChatFormat("", name).constraint(ToolUse(tools, True), None, ""), INFO)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "gemma",
            '<|tool_call>call:f{a:NaN,b:{c:1,"e":"\\u00e9"},<|"|>g h<|"|>:true,i:-1.5e3}<tool_call|>',
            {"a": "NaN", "b": {"c": 1, "e": "é"}, "g h": True, "i": -1500.0},
        ),
        (
            "gemma",
            "<|tool_call>call:f{a:{2024:1.5,New York:[San  Jose ,5],true:null},b:New York}<tool_call|>",
            {"a": {"2024": 1.5, "New York": ["San  Jose", 5], "true": None}, "b": "New York"},
        ),
        ("gemma", "<|tool_call>call:f{a:<|>}<tool_call|>", {"a": None}),
        (
            "pythonic",
            "[f(a=(1,), b=[1, {'x': {2: ()}, },], c='x' \"y\", d={1: ['z'\n'\\n' , None,]})]",
            {"a": [1], "b": [1, {"x": {"2": []}}], "c": "xy", "d": {"1": ["z\n", None]}},
        ),
    ],
)
def test_literal_arguments_are_parsed_as_json(name, text, expected):
    form = ChatFormat("", name)
    for texts in ([text], list(text), *([text[:place], text[place:]] for place in range(len(text)))):
        ((_, arguments),) = parts_of(form.parser(True, ""), texts)[2]
        assert json.dumps(arguments) == json.dumps(expected), texts
