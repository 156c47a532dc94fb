"""Tests of parsing answers into reasoning, content and tool calls, whole and in chunks of any size."""

from __future__ import annotations

import functools
import json
import random

import pytest

from lp_runtime.chat.chat_format import ChatFormat
from lp_runtime.chat.text_reader import MAX_MATCH_CHARS, TextReader
from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.text.reasoning import Reasoning

CONSTRAINT = ConstraintConfig(regex=r"\S.*")  # of the text of an answer that is either only calls or only text
ARGUMENTS = ['{"city": "R}om\\"e", "n": [1, {"a": "]"}]}', "{}"]
MISTRAL_LIST = f'[{{"name": "f", "arguments": {ARGUMENTS[0]}}}, {{"name": "g", "arguments": {ARGUMENTS[1]}}}]'
CALLS = [("f", ARGUMENTS[0]), ("g", ARGUMENTS[1])]


chat_format = functools.cache(ChatFormat)


def reading(tool_format, reasoning="none", prompt_end="", **more):
    """Return a function that makes a parser."""
    return lambda: chat_format("", tool_format, reasoning).parser(tool_format != "none", prompt_end, **more)


def hermes_text(calls):
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


thinking, opened = reading("none", "think"), reading("none", "think", "<think>\n")
cohere = reading("none", "cohere")
hermes, either = reading("hermes", "think"), reading("hermes", "think", text=CONSTRAINT)
KNOWN = [{"type": "function", "function": {"name": name}} for name in "fg"]
F, G = f'{{"name": "f", "arguments": {ARGUMENTS[0]}}}', '{\n  "name": "g",\n  "arguments": {}\n}'


def known(**more):
    """Return a parser for a chat with two tools."""
    return chat_format("", "hermes", "think").parser(KNOWN, "", **more)


def knowing(tool_format):
    """Return a function that makes a parser for a chat with two tools."""
    return lambda: chat_format("", tool_format).parser(KNOWN, "")


llama, mistral, harmony = reading("llama3"), reading("mistral"), reading("harmony")

DRAFT = hermes_text(CALLS[:1])
KIMI_CALL = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS[0]}<|tool_call_end|>"
DEEPSEEK_CALL = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS[0]}<｜tool▁call▁end｜>"
MINIMAX_CALL = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">'
QWEN_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n"

CASES = {
    "plain": (thinking, "a <b> text", "", "a <b> text", []),
    "thinking": (thinking, "<think>\nhm\n</think>\n\ntext", "\nhm\n", "text", []),
    "opened": (opened, "hm</think>text", "hm", "text", []),
    "opened twice": (opened, "<think>hm</think>text", "hm", "text", []),
    "never closed": (opened, "hm", "hm", "", []),
    "never closed, calls": (hermes, "<think>hm\n" + hermes_text(CALLS) + "\n", "hm\n", "", CALLS),
    "never closed, a call in the middle": (hermes, f"<think>hm {DRAFT}so", f"hm {DRAFT}so", "", []),
    "never closed, calls in the middle and at the end": (
        hermes, f"<think>{DRAFT}{DRAFT}so{DRAFT}", f"{DRAFT}{DRAFT}so", "", CALLS[:1]
    ),
    "never closed, a mark and a call": (
        hermes, f"<think>a <tool_call><tool_call>{{ {DRAFT}", "a <tool_call><tool_call>{ ", "", CALLS[:1]
    ),
    "never closed, the beginning of a call": (hermes, '<think><tool_call>{"name', '<tool_call>{"name', "", []),
    "opened, a call": (
        reading("qwen3_coder", "think", "<think>\n"),
        "hm\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "hm\n",
        "",
        CALLS[1:],
    ),
    "a call drafted": (hermes, f"<think>{DRAFT}</think>\n\n{hermes_text(CALLS)}", DRAFT, "", CALLS),
    "a call drafted in part": (
        hermes,
        '<think><tool_call>{"name": "f", "arguments": {"a": "</think>b',
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "b",
        [],
    ),
    "hermes": (hermes, "<think>x</think>say " + hermes_text(CALLS), "x", "say ", CALLS),
    "hermes, text after": (hermes, hermes_text(CALLS[:1]) + "\nand so", "", "and so", CALLS[:1]),
    "hermes, no call": (hermes, "The <tool_call> tag is used.", "", "The <tool_call> tag is used.", []),
    "hermes, no call, and one": (hermes, "<tool_call>no" + hermes_text(CALLS[:1]), "", "<tool_call>no", CALLS[:1]),
    "hermes, arguments first": (
        hermes,
        f'a<tool_call>{{"arguments": {ARGUMENTS[0]}, "name": "f"}}</tool_call>b',
        "",
        "ab",
        CALLS[:1],
    ),
    "hermes, an escape of Markdown": (
        hermes,
        '<tool_call>{"name": "get\\_it", "arguments": {}}</tool_call>',
        "",
        "",
        [("get_it", "{}")],
    ),
    "hermes, no last brace": (hermes, '<tool_call>{"name": "g", "arguments": {}</tool_call>', "", "", CALLS[1:]),
    "hermes, a brace too many": (hermes, '<tool_call>{"name": "g", "arguments": {}}}</tool_call>', "", "", CALLS[1:]),
    "hermes, no name": (
        hermes,
        '<tool_call>{"arguments": {}}</tool_call>',
        "",
        '<tool_call>{"arguments": {}}</tool_call>',
        [],
    ),
    "hermes, bare": (known, f"<think>x</think>\n{F}\n{G}\n", "x", "", CALLS),
    "hermes, bare, text after": (known, f"{G}\nand so", "", "and so", CALLS[1:]),
    "hermes, a bare list": (known, f"[{F}, {G}]", "", "", CALLS),
    "hermes, fenced": (known, f"First:\n```json\n{F}\n```\nThen:\n```json\n{G}\n```", "", "First:\nThen:\n", CALLS),
    "hermes, in the tag of tools": (known, f"<tools>\n{F}\n{G}\n</tools>", "", "", CALLS),
    "hermes, both": (known, f"{F}\n{hermes_text(CALLS[1:])}", "", "", CALLS),
    "hermes, two in a tag": (known, f"<tool_call>{F}\n{G}</tool_call>so", "", "so", CALLS),
    "hermes, a list in a tag": (known, f"<tool_call>[{F}, {G}]</tool_call>so", "", "so", CALLS),
    "hermes, another object after a call": (known, f"{DRAFT}{{}}", "", "{}", CALLS[:1]),
    "granite, a bare list": (knowing("granite"), f"[{F}, {G}]", "", "", CALLS),
    "granite, a bare list of other JSON": (knowing("granite"), '[{"name": "h"}]', "", '[{"name": "h"}]', []),
    "llama, a list": (knowing("llama3"), f"[{F}, {G}]", "", "", CALLS),
    "llama, fenced": (knowing("llama3"), f"So:\n```json\n{F}\n```", "", "So:\n", CALLS[:1]),
    "kimi, another name of the section": (
        reading("kimi_k2"), f"<|tool_call_section_begin|>{KIMI_CALL}<|tool_call_section_end|>", "", "", CALLS[:1]
    ),
    "kimi, no section": (reading("kimi_k2"), f"so{KIMI_CALL} and", "", "soand", CALLS[:1]),
    "deepseek, no section": (reading("deepseek_v31"), f"so{DEEPSEEK_CALL * 2}", "", "so", CALLS[:1] * 2),
    "pythonic, a comma at the end": (
        reading("pythonic"), '[f(a="x", ), g()]', "", "", [("f", '{"a": "x"}'), ("g", "{}")]
    ),
    "gemma, a comma at the end": (
        reading("gemma"), '<|tool_call>call:f{a:<|"|>x<|"|>,}<tool_call|>', "", "", [("f", '{"a": "x"}')]
    ),
    "no closing mark of a value and of a function, and another call": (
        reading("qwen3_coder"), f"{QWEN_CALL}so\n</tool_call>\n{QWEN_CALL}b</parameter></function></tool_call>", "", "",
        [("f", '{"a": "so"}'), ("f", '{"a": "b"}')],
    ),
    "no closing mark of a value and of a function, at the end": (
        reading("qwen3_coder"), f"{QWEN_CALL}so\n</tool_call>\n", "", "", [("f", '{"a": "so"}')]
    ),
    "hermes, a fence of other JSON": (known, "```json\n{}\n```", "", "```json\n{}\n```", []),
    "hermes, another name": (known, G.replace("g", "h"), "", G.replace("g", "h"), []),
    "hermes, bare, in a text": (known, f"Write {G}", "", f"Write {G}", []),
    "hermes, bare, no tools": (hermes, F, "", F, []),
    "hermes, bare, of a constraint": (lambda: known(text=CONSTRAINT), F, "", F, []),
    "llama, a type first": (llama, '{"type": "function", "name": "g", "parameters": {}}', "", "", CALLS[1:]),
    "llama, JSON of a name": (llama, '{"name": "Bob", "age": 3}', "", '{"name": "Bob", "age": 3}', []),
    "llama, a name that is none": (llama, ' {"name": 1}', "", ' {"name": 1}', []),
    "mistral, an id after": (
        mistral,
        f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS[0]}, "id": "123456789"}}, {{"id": "x", "name": "g",'
        ' "arguments": {}}]',
        "",
        "",
        CALLS,
    ),
    "llama": (llama, f'{{"name": "f", "parameters": {ARGUMENTS[0]}}}', "", "", CALLS[:1]),
    "llama, two": (
        llama,
        f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS[0]}}}; {{"name": "g", "parameters": {{}}}}',
        "",
        "",
        CALLS,
    ),
    "llama, JSON that is no call": (llama, '{"a": 1}', "", '{"a": 1}', []),
    "llama, text": (llama, "no {call}", "", "no {call}", []),
    "either, a mark in the text": (either, '{"a": "<tool_call>"}', "", '{"a": "<tool_call>"}', []),
    "either, calls": (either, "<think>x</think>\n\n" + hermes_text(CALLS), "x", "", CALLS),
    "either, less than a mark": (either, "<tool", "", "<tool", []),
    "mistral": (mistral, "[TOOL_CALLS]" + MISTRAL_LIST, "", "", CALLS),
    "mistral, by name": (
        reading("mistral_args"),
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS[0]}[TOOL_CALLS]g[ARGS]{{}}",
        "",
        "",
        CALLS,
    ),
    "cohere": (
        cohere,
        "<|START_THINKING|>x<|END_THINKING|>\n<|START_RESPONSE|>Hello!<|END_RESPONSE|>",
        "x",
        "Hello!",
        [],
    ),
    "cohere, other marks": (cohere, "<|START_THINKING|>x<|END_THINKING|><|START_TEXT|>a b<|END_TEXT|>", "x", "a b", []),
    "cohere, no reasoning": (cohere, "<|START_RESPONSE|>Hello!<|END_RESPONSE|>", "", "Hello!", []),
    "cohere, no marks": (cohere, "<|START_THINKING|>x<|END_THINKING|>\nHello!", "x", "Hello!", []),
    "cohere, plain text": (cohere, " Hello <|START!", "", " Hello <|START!", []),
    "harmony": (
        harmony,
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>text",
        "think",
        "text",
        [],
    ),
    "harmony, a call": (
        harmony,
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        f" <|constrain|>json<|message|>{ARGUMENTS[0]}<|call|>",
        "think",
        "",
        CALLS[:1],
    ),
    "harmony, a name with a dot": (
        harmony,
        "<|channel|>commentary to=functions.get.it<|message|>{}<|call|>",
        "",
        "",
        [("get.it", "{}")],
    ),
    "harmony, a message that the prompt has begun": (
        reading("harmony", prompt_end="<|start|>assistant<|channel|>final<|message|>"), "text", "", "text", []
    ),
    "harmony, a message that the prompt has begun, and text of it": (
        reading("harmony", prompt_end="<|start|>assistant<|channel|>final<|message|>a <"), "|b", "", "|b", []
    ),
    "a call that is cut": (
        reading("qwen3_coder"),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nso",
        "",
        "",
        [("f", '{"a": 1, "b": ')],
    ),
    "a call that is cut after a value": (
        reading("qwen3_coder"),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
        "",
        "",
        [("f", '{"a": 1')],
    ),
    "no closing mark of a value": (
        reading("qwen3_coder"),
        "<tool_call>\n<function=f>\n<parameter=a>\n<parameter>\n<b>\n<parameter=b>\n5\n</function>\n</tool_call>\nso",
        "",
        "so",
        [("f", '{"a": "<parameter>\\n<b>", "b": 5}')],
    ),
    "no closing mark of a value, one line": (
        reading("glm"),
        "<tool_call>f<arg_key>a</arg_key><arg_value>x\n<arg_key>b</arg_key><arg_value>5</tool_call>",
        "",
        "",
        [("f", '{"a": "x", "b": 5}')],
    ),
    "no closing mark of a function": (
        reading("qwen3_coder"),
        "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</tool_call>",
        "",
        "",
        [("f", '{"a": 5}')],
    ),
    "no closing mark of a value at the end": (
        reading("qwen3_coder"), f"{QWEN_CALL}so\n</function>\n", "", "", [("f", '{"a": "so"}')]
    ),
    "no closing mark of a value and of a call": (
        reading("qwen3_coder"), f"{QWEN_CALL}5\n</function>", "", "", [("f", '{"a": 5}')]
    ),
    "a call that is cut in the next key": (
        reading("qwen3_coder"), f"{QWEN_CALL}1\n</parameter>\n<param", "", "", [("f", '{"a": 1')]
    ),
    "a call that is cut in the mark of the next key": (
        reading("deepseek_v32"),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n<｜DSML｜parameter name="b" str',
        "",
        "",
        [("f", '{"a": "x"')],
    ),
    "a call that is cut in the next name": (reading("pythonic"), '[f(a="x", b', "", "", [("f", '{"a": "x"')]),
    "a call that is cut before its arguments": (knowing("mistral_args"), "[TOOL_CALLS]f[ARGS]", "", "", [("f", "")]),
    "a call that its model ended in a value": (
        reading("qwen3_coder"), f"{QWEN_CALL}so", "", "", [("f", '{"a": "so"}')]
    ),
    "a call that its model ended after a value": (
        reading("qwen3_coder"), f"{QWEN_CALL}1\n</parameter>\n", "", "", [("f", '{"a": 1}')]
    ),
    "a call that is cut in the mark of its end": (
        reading("qwen3_coder"), f"{QWEN_CALL}so\n</func", "", "", [("f", '{"a": ')]
    ),
    "a head that is cut": (hermes, 'I look.<tool_call>\n{"na', "", "I look.", []),
    "a head that is cut after its mark": (hermes, "I look.<tool_call>", "", "I look.", []),
    "a head that is cut after a call": (hermes, f"{DRAFT}\n<tool_call>", "", "", CALLS[:1]),
    "a head that is cut in the mark": (hermes, "I look.<tool_ca", "", "I look.<tool_ca", []),
    "a head that is cut, without a mark": (knowing("llama3"), '{"name": "f", "par', "", '{"name": "f", "par', []),
    "a head that is cut in the first key": (reading("qwen3_coder"), f"{QWEN_CALL[:-3]}", "", "", []),
    "a head that is cut in the name": (knowing("mistral_args"), "so[TOOL_CALLS]get_wea", "", "so", []),
    "a head that is cut in a list": (mistral, f'[TOOL_CALLS]{MISTRAL_LIST[:-1]}, {{"name": "f', "", "", CALLS),
    "a head that is cut in a list without a mark": (reading("pythonic"), "[g(), f(a", "", "", CALLS[1:]),
    "text after a mark that is cut": (hermes, "The <tool_call> tag", "", "The <tool_call> tag", []),
    "the mark of an end in a value": (
        reading("qwen3_coder"), f"{QWEN_CALL}a</function>b\n</parameter>\n</function>", "", "",
        [("f", '{"a": "a</function>b"}')],
    ),
    "the mark of an end in a value, where it is the only one": (
        reading("glm"), "<tool_call>f<arg_key>a</arg_key><arg_value>a</tool_call>b</arg_value></tool_call>", "", "",
        [("f", '{"a": "a</tool_call>b"}')],
    ),
    "the mark of an end in a value, in a section": (
        reading("minimax_m2"),
        f'{MINIMAX_CALL}a</invoke>b</parameter></invoke>\n</minimax:tool_call>', "", "",
        [("f", '{"a": "a</invoke>b"}')],
    ),
    "no closing mark of a value, in a section": (
        reading("minimax_m2"),
        f'{MINIMAX_CALL}x</invoke>\n<invoke name="g"></invoke></minimax:tool_call>', "", "",
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    "no closing mark of a value, at the end of a section": (
        reading("minimax_m2"), f"{MINIMAX_CALL}x</invoke></minimax:tool_call>so", "", "so", [("f", '{"a": "x"}')]
    ),
    "pythonic, code": (reading("pythonic"), "[f(x) for x in y]", "", "[f(x) for x in y]", []),
    "pythonic, a link": (reading("pythonic"), "[see](http://x)", "", "[see](http://x)", []),
}  # fmt: skip


def parsed(parser, parts, is_cut=False):
    pieces = [piece for part in parts for piece in parser.add(part)] + parser.finish(is_cut)
    texts = {kind: "".join(each.text for each in pieces if each.kind == kind) for kind in ("reasoning", "content")}
    names = {each.call: each.name for each in pieces if each.name is not None}
    calls = [
        (name, "".join(each.text for each in pieces if each.kind == "arguments" and each.call == number))
        for number, name in names.items()
    ]
    assert len({each.call_id for each in pieces if each.call_id}) == len(calls)
    return texts["reasoning"], texts["content"], calls


@pytest.mark.parametrize("name", CASES)
def test_parsed_parts_do_not_depend_on_the_chunks(name):
    (make, text, *expected), is_cut = CASES[name], "that is cut" in name
    assert list(parsed(make(), [text], is_cut)) == expected
    rng = random.Random(name)
    for _ in range(8):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(parsed(make(), parts, is_cut)) == expected, parts
    assert list(parsed(make(), list(text), is_cut)) == expected


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, '"5"'),
        ({"allOf": [{"type": "string"}]}, '"5"'),
        ({"allOf": [{}, {"type": ["string", "integer"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}]}, '"5"'),
        ({"allOf": [{"type": "number"}, {"type": "integer"}], "anyOf": [{"type": "string"}, {}]}, "5"),
        ({"allOf": [{}]}, "5"),
    ],
)
def test_plain_value_has_the_type_of_its_schema(schema, value):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    text = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    assert parsed(chat_format("", "qwen3_coder").parser(tools, ""), [text])[2] == [("f", f'{{"a": {value}}}')]


UNITS = {"type": "string", "enum": ["celsius", "kelvin"]}
DEFINITIONS = {"Unit": UNITS, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 8}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (UNITS, "celsius"),
        ({"$ref": "#/$defs/Unit"}, "celsius"),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, "celsius"),
        ({"type": "string", "pattern": "^[a-z]+$"}, "celsius"),
        ({"anyOf": [{"type": "string", "maxLength": 7}, {"type": "null"}]}, "celsius"),
        ({"type": "string"}, " celsius\n"),
        ({"$ref": "#/$defs/Loop"}, " celsius\n"),
        ({"anyOf": 5}, " celsius\n"),
    ],
)
def test_space_around_a_text_that_a_schema_limits_is_not_part_of_it(schema, value):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}, "$defs": DEFINITIONS}}}]
    text = "<tool_call>\n<function=f>\n<parameter=a>\n celsius\n\n</parameter>\n</function>\n</tool_call>"
    assert parsed(chat_format("", "qwen3_coder").parser(tools, ""), [text])[2] == [("f", json.dumps({"a": value}))]


WRITTEN = {
    '{"a": "x\ny\t"}': {"a": "x\ny\t"},
    r'{"a": "it\'s", "b": "\d+ C:\Users \/ \u00e9 \\n \n"}': {"a": "it's", "b": "\\d+ C:\\Users / é \\n \n"},
    '{"a": True, "b": [None, False, ], "c": {"d": 1.50,},}': {"a": True, "b": [None, False], "c": {"d": 1.5}},
    r'"{\"a\": \"x\ny\"}"': {"a": "x\ny"},
    r'"\"{\\\"a\\\": True}\""': {"a": True},
    **dict.fromkeys(("null", "None", '""', '"x"', r'"{\"a"', "[]", '[{"a": 1}]', "5", "", " "), {}),
}  # arguments as models write them, and what they mean


@pytest.mark.parametrize(("text", "meant"), WRITTEN.items())
@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": %s, "name": "f"}\n</tool_call>'),
        ("llama3", '{"name": "f", "parameters": %s}'),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s"),
    ],
)
def test_arguments_are_a_json_object_whatever_a_model_writes(form, answer, text, meant):
    answer = answer % text
    for parts in ([answer], list(answer), *([answer[:place], answer[place:]] for place in range(len(answer)))):
        _, content, ((name, arguments),) = parsed(reading(form)(), parts)
        assert (content, name) == ("", "f") and json.loads(arguments) == meant, parts


@pytest.mark.parametrize("text", ['{"a": "print("x")"}', '{"a": 1 "b": 2}', "{'a': 'x'}", '{"a":  1,"b":[ 2 ]}'])
def test_other_arguments_are_as_the_model_wrote_them(text):
    """A client that cannot read them asks again; a guess at what was meant would be run."""
    answer = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'
    for parts in ([answer], list(answer)):
        _, _, ((_, arguments),) = parsed(hermes(), parts)
        assert arguments == text


@pytest.mark.parametrize("text", ['{"a": tr', '{"a": "x', '{"a": [1, ', r'"{\"a\": 1', "[1,", ""])
def test_arguments_that_are_cut_are_unfinished_json(text):
    answer = f'<tool_call>{{"name": "f", "arguments": {text}'
    expected = text if text.startswith("{") else ""
    for parts in ([answer], list(answer)):
        assert parsed(hermes(), parts) == ("", "", [("f", expected)])


@pytest.mark.parametrize(
    ("form", "answer", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\', '{"a": "x'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\u00e', '{"a": "x'),
        ("pythonic", "[f(a='x\\", '{"a": "x'),
        ("gemma", '<|tool_call>call:f{a:<|"|>x<|"', '{"a": "x'),
        ("qwen3_coder", f"{QWEN_CALL}x\n</param", '{"a": "x'),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>x</", '{"a": "x'),
    ],
)
def test_an_escape_or_a_closing_mark_that_is_cut_is_no_part_of_a_text(form, answer, arguments):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    for parts in ([answer], list(answer)):
        assert parsed(chat_format("", form).parser(tools, ""), parts, is_cut=True)[2] == [("f", arguments)]


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>%s<|tool_call_end|><|tool_calls_section_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
COMMENTARY = "<|channel|>commentary to=%s <|constrain|>json<|message|>%s<|call|>"
EMPTY: dict[str, dict[str, str]] = {"f": {}}
FULL = {"f": {"a": "x"}}
WITHOUT_ARGUMENTS = [
    (
        "hermes",
        '<tool_call>\n{"name": "f"}\n</tool_call>\n<tool_call>{"id": 1, "name": "g" }</tool_call>',
        {"f": {}, "g": {}},
    ),
    ("hermes", '{"name": "f"}', EMPTY),
    ("hermes", '<tool_call>{"name": "h"}</tool_call>', {"h": {}}),
    ("llama3", '{"name": "f"}', EMPTY),
    ("llama3", '{"name": "f"}; {"type": "function", "name": "g"}', {"f": {}, "g": {}}),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"name": "g", "id": "x"}]', {"f": {}, "g": {}}),
    ("mistral_args", "[TOOL_CALLS]f", EMPTY),
    ("mistral_args", "[TOOL_CALLS]f[ARGS]", EMPTY),
    ("mistral_args", "[TOOL_CALLS]f[TOOL_CALLS]g[ARGS]{}", {"f": {}, "g": {}}),
    ("deepseek_v3", DEEPSEEK % "function<｜tool▁sep｜>f\n```json\n```", EMPTY),
    ("deepseek_v31", DEEPSEEK % "f<｜tool▁sep｜>", EMPTY),
    ("deepseek_v31", DEEPSEEK % "f", EMPTY),
    ("kimi_k2", KIMI % "functions.f:0<|tool_call_argument_begin|>", EMPTY),
    ("kimi_k2", KIMI % "functions.f:0<|tool_call_argument_begin|>null", EMPTY),
    ("harmony", COMMENTARY % ("functions.f", ""), EMPTY),
]
WITHOUT_MARK = [
    ("mistral_args", '[TOOL_CALLS]f{"a": "x"}[TOOL_CALLS]g {}', {"f": {"a": "x"}, "g": {}}),
    ("mistral_id", '[TOOL_CALLS]f{"a": "x"}[TOOL_CALLS]g[ARGS]{}', {"f": {"a": "x"}, "g": {}}),
    ("deepseek_v31", DEEPSEEK % 'f{"a": "x"}', FULL),
]
WITHOUT_PREFIX = [
    ("harmony", COMMENTARY % ("f", '{"a":"x"}'), FULL),
    ("kimi_k2", KIMI % 'f:0<|tool_call_argument_begin|>{"a": "x"}', FULL),
    ("kimi_k2", KIMI % ' functions.f:0 <|tool_call_argument_begin|> {"a": "x"} ', FULL),
    ("gemma", '<|tool_call>f{a:<|"|>x<|"|>}<tool_call|>', FULL),
]


@pytest.mark.parametrize(("form", "answer", "calls"), [*WITHOUT_ARGUMENTS, *WITHOUT_MARK, *WITHOUT_PREFIX])
def test_calls_without_arguments_or_a_mark_or_prefix_are_read(form, answer, calls):
    for parts in ([answer], list(answer), *([answer[:place], answer[place:]] for place in range(len(answer)))):
        _, content, read = parsed(chat_format("", form).parser(KNOWN, ""), parts)
        assert (content, {name: json.loads(text) for name, text in read}) == ("", calls), parts


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("hermes", '{"name": "h"}'),
        ("llama3", '{"name": "Bob"}'),
        ("llama3", '{"name": "f"'),
        ("mistral_args", "[TOOL_CALLS]h"),
        ("mistral_args", "[TOOL_CALLS] is a mark"),
        ("mistral_args", "[TOOL_CALLS]h{}"),
        ("deepseek_v3", DEEPSEEK % "function<｜tool▁sep｜>f\n```json\nno\n```"),
        ("kimi_k2", KIMI % "h:0<|tool_call_argument_begin|>{}"),
        ("gemma", "<|tool_call>h{}<tool_call|>"),
    ],
)
def test_other_names_and_texts_after_a_mark_are_text(form, answer):
    for parts in ([answer], list(answer)):
        assert parsed(chat_format("", form).parser(KNOWN, ""), parts) == ("", answer, [])


def test_constrained_text_that_names_a_tool_is_no_call():
    parser = chat_format("", "llama3").parser(KNOWN, "", text=CONSTRAINT)
    assert parsed(parser, list('{"name": "f"}')) == ("", '{"name": "f"}', [])


def test_message_to_another_recipient_is_no_call():
    parser = chat_format("", "harmony").parser(KNOWN, "")
    assert parsed(parser, list(COMMENTARY % ("python", "{}"))) == ("", "{}", [])


def test_json_without_a_call_is_streamed_at_once():
    for parser in (llama(), reading("llama3", text=CONSTRAINT)()):
        parts = [parser.add(part) for part in ('{"na', 'mes": [', "1, ", "2]}")]
        assert [[piece.text for piece in part] for part in parts] == [[], ['{"names": ['], ["1, "], ["2]}"]]


@pytest.mark.parametrize("begin", ['{"na', '{"name": "', '{"id": "'])
def test_unfinished_call_head_is_released_after_max_match_chars(begin):
    parser = llama()
    assert parser.add(begin) == []
    pieces = [piece for _ in range(MAX_MATCH_CHARS + 1) for piece in parser.add("x")]
    assert "".join(piece.text for piece in pieces) == begin + "x" * (MAX_MATCH_CHARS + 1)


def test_reasoning_is_held_back_only_where_it_may_be_a_call():
    parser = hermes()
    parts = [parser.add(part) for part in ("<think>a <tool_call> ", "tag", DRAFT, "\n", "s", "o")]
    assert [[piece.text for piece in part] for part in parts] == [
        ["a "],
        ["<tool_call> tag"],
        [],
        [],
        [DRAFT + "\ns"],
        ["o"],
    ]


def test_arguments_are_streamed_before_the_call_ends():
    parser = hermes()
    parser.add('<tool_call>\n{"name": "f", "arguments": {"city": "Ro')
    (piece,) = parser.add("me and")
    assert (piece.kind, piece.text) == ("arguments", "me and")
    (piece,) = parser.add('", "days": [1, 2], "x')
    assert piece.text == '", "days": [1, 2], "x'


@pytest.mark.parametrize("end", ["</think>done", DRAFT])
def test_many_drafted_calls_are_read_in_proportion_to_the_text(monkeypatch, end):
    added, add = list[int](), TextReader.add
    monkeypatch.setattr(TextReader, "add", lambda self, text: (added.append(len(text)), add(self, text)))
    numbers = []
    for num in (200, 800):
        text = f"<think>{DRAFT * 2} or so " * num + end
        calls = CALLS[:1] if end == DRAFT else []
        whole = parsed(hermes(), [text])
        numbers.append(sum(added))
        added.clear()
        assert whole[2] == calls and whole == parsed(hermes(), [text[:9000], text[9000:9001], text[9001:]])
        added.clear()
    assert numbers[1] < 6 * numbers[0]


@pytest.mark.parametrize(
    ("tool_format", "reasoning", "prompt_end", "marks"),
    [
        ("harmony", "auto", "<|start|>assistant", ("", "<|message|>", ())),
        ("harmony", "auto", "<|start|>assistant<|channel|>analysis<|message|>hm", ("", "<|message|>", ())),
        ("harmony", "auto", "<|start|>assistant<|channel|>final<|message|>text", None),
        ("harmony", "auto", "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{", None),
        ("harmony", "auto", "<|start|>user<|message|>Hi<|end|>", ("", "<|message|>", ())),
        ("none", "think", "assistant\n", ("<think>", "</think>", ())),
        ("none", "think", "assistant\n<think>\n", (None, "</think>", ())),
        ("none", "mistral", "[/INST]", ("[THINK]", "[/THINK]", ())),
        (
            "none",
            "cohere",
            "",
            ("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|START_TEXT|>")),
        ),
        ("none", "none", "assistant\n", None),
    ],
)
def test_reasoning_marks_depend_on_format_and_prompt_end(tool_format, reasoning, prompt_end, marks):
    found = ChatFormat("", tool_format, reasoning).reasoning_marks(prompt_end)
    assert found == (None if marks is None else Reasoning(*marks))
