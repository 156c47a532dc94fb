"""Answers taken apart, whole and in pieces of any size."""

from __future__ import annotations

import json
import random

import pytest

from lp_runtime import ConstraintConfig
from lp_runtime.server.chat.call_reader import MAX_HEAD_CHARS
from lp_runtime.server.chat.chat_format import FORMATS, ChatFormat, guess_format
from lp_runtime.server.chat.chat_parser import HarmonyParser, TextParser
from lp_runtime.server.chat.tools import Tool, ToolUse

ARGUMENTS = ['{"city": "R}om\\"e", "n": [1, {"a": "]"}]}', "{}"]
MISTRAL_LIST = f'[{{"name": "f", "arguments": {ARGUMENTS[0]}}}, {{"name": "g", "arguments": {ARGUMENTS[1]}}}]'
CALLS = [("f", ARGUMENTS[0]), ("g", ARGUMENTS[1])]


def hermes():
    return TextParser(True, False, ("<tool_call>",), "</tool_call>")


def hermes_text(calls):
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


def mistral():
    return TextParser(False, False, ("[TOOL_CALLS]",))


def llama():
    return TextParser(False, False, ("<|python_tag|>",), bare=True)


def either():
    return TextParser(True, False, ("<tool_call>",), "</tool_call>", is_either=True)


CASES = {
    "plain": (lambda: TextParser(True, False), "a <b> text", "", "a <b> text", []),
    "thinking": (lambda: TextParser(True, False), "<think>\nhm\n</think>\n\ntext", "\nhm\n", "text", []),
    "opened": (lambda: TextParser(True, True), "hm</think>text", "hm", "text", []),
    "never closed": (lambda: TextParser(True, True), "hm", "hm", "", []),
    "hermes": (hermes, "<think>x</think>say " + hermes_text(CALLS), "x", "say ", CALLS),
    "hermes, text behind": (hermes, hermes_text(CALLS[:1]) + "\nand so", "", "and so", CALLS[:1]),
    "hermes, no call": (hermes, "<tool_call>nonsense</tool_call>", "", "nonsense</tool_call>", []),
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
    "hermes, no name": (
        hermes,
        '<tool_call>{"arguments": {}}</tool_call>',
        "",
        '{"arguments": {}}</tool_call>',
        [],
    ),
    "llama, a type first": (llama, '{"type": "function", "name": "g", "parameters": {}}', "", "", CALLS[1:]),
    "llama, JSON of a name": (llama, '{"name": "Bob", "age": 3}', "", '{"name": "Bob", "age": 3}', []),
    "llama, a name that is none": (llama, '{"name": 1}', "", '{"name": 1}', []),
    "mistral, an id behind": (
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
        mistral,
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS[0]}[TOOL_CALLS]g[ARGS]{{}}",
        "",
        "",
        CALLS,
    ),
    "harmony": (
        HarmonyParser,
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>text",
        "think",
        "text",
        [],
    ),
    "harmony, a call": (
        HarmonyParser,
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        f" <|constrain|>json<|message|>{ARGUMENTS[0]}<|call|>",
        "think",
        "",
        CALLS[:1],
    ),
    "harmony, a name with a dot": (
        HarmonyParser,
        "<|channel|>commentary to=functions.get.it<|message|>{}<|call|>",
        "",
        "",
        [("get.it", "{}")],
    ),
}


def taken_apart(parser, parts):
    pieces = [piece for part in parts for piece in parser.add(part)] + parser.finish()
    texts = {kind: "".join(each.text for each in pieces if each.kind == kind) for kind in ("reasoning", "content")}
    names = {each.call: each.name for each in pieces if each.name is not None}
    calls = [
        (name, "".join(each.text for each in pieces if each.kind == "arguments" and each.call == number))
        for number, name in names.items()
    ]
    assert len({each.call_id for each in pieces if each.call_id}) == len(calls) == parser.num_calls
    return texts["reasoning"], texts["content"], calls


@pytest.mark.parametrize("name", CASES)
def test_any_pieces_give_the_same_parts(name):
    make, text, *expected = CASES[name]
    assert list(taken_apart(make(), [text])) == expected
    rng = random.Random(name)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(taken_apart(make(), parts)) == expected, parts
    assert list(taken_apart(make(), list(text))) == expected


def test_json_that_is_no_call_is_not_held_back():
    for parser in (llama(), TextParser(False, False, ("<|python_tag|>",), bare=True, is_either=True)):
        parts = [parser.add(part) for part in ('{"na', 'mes": [', "1, ", "2]}")]
        assert [[piece.text for piece in part] for part in parts] == [[], ['{"names": ['], ["1, "], ["2]}"]]


@pytest.mark.parametrize("begin", ['{"na', '{"name": "', '{"id": "'])
def test_a_head_without_an_end_is_not_held_back_for_ever(begin):
    parser = llama()
    assert parser.add(begin) == []
    pieces = [piece for _ in range(MAX_HEAD_CHARS + 1) for piece in parser.add("x")]
    assert "".join(piece.text for piece in pieces) == begin + "x" * (MAX_HEAD_CHARS + 1)


def test_arguments_come_before_their_call_ends():
    parser = hermes()
    parser.add('<tool_call>\n{"name": "f", "arguments": {"city": "Ro')
    (piece,) = parser.add("me and")
    assert (piece.kind, piece.text) == ("arguments", "me and")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|channel|>", "harmony"),
        ("# user", "none"),
    ],
)
def test_the_format_is_guessed_from_the_template(template, name):
    assert guess_format(template) == name


@pytest.mark.parametrize(
    ("template", "prompt_end", "marks"),
    [
        ("<|channel|>", "<|start|>assistant", ("", "<|channel|>final<|message|>")),
        ("</think>", "assistant\n", ("<think>", "</think>")),
        ("</think>", "assistant\n<think>\n", (None, "</think>")),
        ("# user", "assistant\n", None),
    ],
)
def test_the_marks_around_reasoning(template, prompt_end, marks):
    assert ChatFormat(template).reasoning_marks(prompt_end) == marks


TEXTS = [chr(each) for each in range(32, 127)] + ["\n", "</s>"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 'y"}']}, "b": {"type": "boolean"}},
    "required": ["a"],
}


def drawn(constraint, num):
    """Yield random texts under a constraint."""
    xgrammar = pytest.importorskip("xgrammar")
    from lp_runtime.constraints.compiled import compile_constraint, load_compiled

    info = xgrammar.TokenizerInfo(TEXTS, stop_token_ids=[len(TEXTS) - 1])
    grammar = load_compiled(compile_constraint(constraint, info), info)
    rng = random.Random(1)
    for _ in range(num):
        matcher, text = xgrammar.GrammarMatcher(grammar), ""
        mask = xgrammar.allocate_token_bitmask(1, len(TEXTS))
        while True:
            matcher.fill_next_token_bitmask(mask)
            allowed = [each for each in range(len(TEXTS)) if int(mask[0, each // 32]) >> (each % 32) & 1]
            token = rng.choice(allowed)
            matcher.accept_token(token)
            if token == len(TEXTS) - 1:
                break
            text += TEXTS[token]
        yield text


def format_of(name):
    form = ChatFormat("tools", "mistral" if name == "mistral_args" else name, "none")
    form.tool_format = name
    return form


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_constrained_call_is_read_back(name, is_parallel):
    """Random text under the constraint of calls is taken apart to calls of the tools, with valid arguments."""
    form = format_of(name)
    tools = [Tool(function={"name": each, "parameters": SCHEMA}) for each in ("f", "g_2")]
    counts = set()
    for text in drawn(form.constraint(ToolUse(tools, True, is_parallel), None, "", may_think=False), 30):
        reasoning, content, calls = taken_apart(form.parser(True, ""), [text])
        assert not reasoning and not content.strip() and calls, text
        counts.add(len(calls))
        for called, arguments in calls:
            assert called in ("f", "g_2") and json.loads(arguments)["a"] in ("x", 'y"}')
    assert (max(counts) > 1) == (is_parallel and name != "harmony")


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_or_a_text(name):
    """Random text under the constraint of calls and of text is calls alone or text alone, and both occur."""
    form = format_of(name)
    tools = [Tool(function={"name": "f", "parameters": SCHEMA})]
    num_calls = 0
    text_schema = {"type": "object", "properties": {"c": {"enum": ["<tool_call>", "[TOOL_CALLS]"]}}, "required": ["c"]}
    constraint = form.constraint(ToolUse(tools), ConstraintConfig(json_schema=text_schema), "", may_think=False)
    for text in drawn(constraint, 30):
        _, content, calls = taken_apart(form.parser(True, "", is_either=True), [text])
        num_calls += bool(calls)
        if not calls:
            assert json.loads(content)["c"] in ("<tool_call>", "[TOOL_CALLS]")
        assert not (calls and content.strip()), text
    assert 0 < num_calls < 30
    assert form.constraint(ToolUse(tools, must_call=True), ConstraintConfig(regex="a"), "") == form.constraint(
        ToolUse(tools, must_call=True), None, ""
    )
