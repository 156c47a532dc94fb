"""Tests of every tool format: whole, streamed and constrained answers, and calls in the history."""

from __future__ import annotations

import functools
import json

import jsonschema
import pytest
import xgrammar
from support.constrained_texts import INFO, texts_of
from support.thinned import slow
from support.tool_answers import (
    TOOLS,
    constrained_calls,
    cut_answers,
    follows_schemas,
    history_of,
    parts_of,
    read_recorded,
    tools_of,
    wrong_random_answers,
)
from support.tool_formats import SAMPLES

from lp_runtime import ConstraintConfig
from lp_runtime.chat import formats
from lp_runtime.chat.chat_format import ChatFormat, Tool, ToolUse
from lp_runtime.config.serving import REASONINGS, TOOL_FORMATS
from lp_runtime.constraints.compiled import compile_constraint, load_compiled

NUM_STARTS = 3  # of the places where recorded answers are cut
NUM_RANDOM = 5  # answers per format and test; tests/support/tool_answers.py draws more


def test_settings_name_every_format():
    assert set(TOOL_FORMATS) == {"auto", "none", "response_template", *formats.FORMATS}
    assert set(REASONINGS) == {"auto", "none", *formats.REASONINGS}
    assert set(SAMPLES) == set(formats.FORMATS)


@functools.cache
def format_of(name: str) -> ChatFormat:
    """Return the format that is recognized from a sample's template. It has no state."""
    return ChatFormat(SAMPLES[name].template.text)


@pytest.mark.parametrize("name", SAMPLES)
def test_template_is_recognized(name):
    assert format_of(name).tool_format == name


@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=[pytest.mark.slow] if start else []) for start in range(NUM_STARTS)]
)
@pytest.mark.parametrize(("place", "name"), [*enumerate(SAMPLES)])
def test_recorded_answer_is_parsed_whole_and_in_chunks(place, name, start):
    """Two chunks are cut at every third place: each format begins at another one."""
    sample = SAMPLES[name]
    for texts in ([sample.answer], *cut_answers(name, (place + start) % NUM_STARTS, NUM_STARTS)):
        assert read_recorded(name, format_of(name), texts) == sample.parts, texts


@pytest.mark.parametrize("name", SAMPLES)
def test_rendered_history_is_parsed_into_its_calls(name):
    calls, form = SAMPLES[name].parts[2], format_of(name)
    assert parts_of(form.parser(tools_of(calls), ""), [history_of(name, form, calls)])[2] == calls


@pytest.mark.parametrize("name", SAMPLES)
def test_random_answers_are_parsed_correctly(name):
    assert not wrong_random_answers(name, NUM_RANDOM, seed=1)


@pytest.mark.parametrize(
    ("name", "is_parallel"),
    [
        *((name, True) for name in SAMPLES),
        ("hermes", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in SAMPLES if name != "hermes"),
    ],
)
def test_constrained_call_is_parsed_back(name, is_parallel):
    """Random text under a tool-call constraint is parsed into calls of the tools with valid arguments."""
    wrong, counts = constrained_calls(name, is_parallel, 8)
    assert not wrong and (max(counts) > 1) == (is_parallel and formats.FORMATS[name].separator is not None)


# Formats that are built into xgrammar and were written independently of ours.
BUILT_IN = {
    "hermes": "qwen_3",
    "qwen3_coder": "qwen_3_coder",
    "glm": "glm_4_7",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "kimi_k2": "kimi",
    "minimax_m2": "minimax",
    "harmony": "harmony",
    "llama3": "llama",
}


@pytest.mark.parametrize("name", slow(BUILT_IN, ("deepseek_v31", "deepseek_v4")))  # like v3 and v3.2
def test_calls_in_xgrammar_formats_are_parsed(name):
    shown = TOOLS
    tag = xgrammar.get_model_structural_tag(BUILT_IN[name], shown, "required", "disabled", parallel_tool_calls=False)
    prompt_end = "<think>" if name == "minimax_m2" else ""
    for text in texts_of(ConstraintConfig(structural_tag=tag.model_dump()), NUM_RANDOM):
        if text:  # harmony's text may be empty
            _, content, calls = parts_of(ChatFormat("</think>", name).parser(TOOLS, prompt_end), [text])
            assert len(calls) == 1 and not content.strip() and follows_schemas(calls), text


LIMITED = [
    {"anyOf": [{"type": "boolean"}, {"maximum": 3}]},
    {"pattern": "^b+$"},
    {"minimum": 3},
    {"exclusiveMaximum": 3, "minimum": -5},
    {"minItems": 2},
    {"minItems": 1, "prefixItems": [{"type": "integer"}]},
    {"minProperties": 1},
    {"$ref": "#/$defs/a~1b"},
    {"$ref": "#/$defs/group/x"},
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2", "deepseek_v32"])
def test_arguments_in_xml_follow_their_limits(name):
    definitions = {"a/b": {"minimum": 9}, "group": {"x": {"enum": ["x y"]}}}
    form = ChatFormat("", name, "none")
    for value in LIMITED:
        schema = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
        schema["$defs"] = definitions
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        for text in texts_of(form.constraint(ToolUse(tools, True, False), None, ""), 12):
            ((_, arguments),) = parts_of(form.parser(tools, ""), [text])[2]
            jsonschema.Draft202012Validator(schema).validate(arguments)


def test_text_in_xml_has_its_least_length():
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"minLength": 9}}, "required": ["a"]}}}]
    constraint = ChatFormat("", "qwen3_coder", "none").constraint(ToolUse(tools, True, False), None, "")
    grammar = load_compiled(compile_constraint(constraint, INFO), INFO)
    for text in ("abc", "abcdefghi"):
        matcher = xgrammar.GrammarMatcher(grammar)
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert (matcher.accept_string(call) and matcher.is_completed()) == (len(text) == 9)


# Formats with the style and the place of marks of another one.
ALIKE = ("seed_oss", "deepseek_v31", "deepseek_v4", "mistral_id", "nemotron", "phi4_mini")


@pytest.mark.parametrize("name", slow(SAMPLES, ALIKE))
def test_constraint_allows_either_calls_or_text(name):
    """Random text under a constraint for calls or text is only calls or only text, and both occur."""
    form, num_calls = ChatFormat("", name, "none"), 0
    text_schema = {"type": "object", "properties": {"c": {"enum": ["<tool_call>", "[TOOL_CALLS]"]}}, "required": ["c"]}
    use, only = ToolUse(TOOLS), ConstraintConfig(json_schema=text_schema)
    for text in texts_of(form.constraint(use, only, "", may_think=False), NUM_RANDOM):
        _, content, calls = parts_of(form.parser(TOOLS, "", only), [text])
        num_calls += bool(calls)
        if not calls:
            jsonschema.validate(json.loads(content), text_schema)
        assert not (calls and content.strip()), text
    assert 0 < num_calls < NUM_RANDOM
    must = ToolUse(TOOLS, must_call=True)
    assert form.constraint(must, ConstraintConfig(regex="a"), "") == form.constraint(must, None, "")


@pytest.mark.parametrize("name", SAMPLES)
def test_tool_without_parameters_takes_no_arguments(name):
    tools: list[Tool] = [{"type": "function", "function": {"name": "f"}}]
    form = ChatFormat("", name, "none")
    for text in texts_of(form.constraint(ToolUse(tools, True, False), None, "", may_think=False), NUM_RANDOM):
        assert parts_of(form.parser(tools, ""), [text])[2] == [("f", {})]
