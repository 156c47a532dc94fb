"""Answers taken apart, whole and in pieces of any size."""

from __future__ import annotations

import json
import random

import pytest

from lp_runtime.server.chat_parser import HarmonyParser, TextParser
from lp_runtime.server.tools import FORMATS, ChatFormat, Tool, guess_format

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


CASES = {
    "plain": (lambda: TextParser(True, False), "a <b> text", "", "a <b> text", []),
    "thinking": (lambda: TextParser(True, False), "<think>\nhm\n</think>\n\ntext", "\nhm\n", "text", []),
    "opened": (lambda: TextParser(True, True), "hm</think>text", "hm", "text", []),
    "never closed": (lambda: TextParser(True, True), "hm", "hm", "", []),
    "hermes": (hermes, "<think>x</think>say " + hermes_text(CALLS), "x", "say ", CALLS),
    "hermes, text behind": (hermes, hermes_text(CALLS[:1]) + "\nand so", "", "and so", CALLS[:1]),
    "hermes, no call": (hermes, "<tool_call>nonsense</tool_call>", "", "nonsense</tool_call>", []),
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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_constrained_call_is_read_back(name, is_parallel):
    """Random text under the constraint of calls is taken apart to calls of the tools, with valid arguments."""
    xgrammar = pytest.importorskip("xgrammar")
    from lp_runtime.constraints.compiled import compile_constraint, load_compiled

    form = ChatFormat("tools", "mistral" if name == "mistral_args" else name, "none")
    form.tool_format = name
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", 'y"}']}, "b": {"type": "boolean"}},
        "required": ["a"],
    }
    tools = [Tool(function={"name": each, "parameters": schema}) for each in ("f", "g_2")]
    texts = [chr(each) for each in range(32, 127)] + ["\n", "</s>"]
    info = xgrammar.TokenizerInfo(texts, stop_token_ids=[len(texts) - 1])
    grammar = load_compiled(
        compile_constraint(form.constraint_of_calls(tools, is_parallel, "", may_think=False), info), info
    )
    rng, counts = random.Random(1), set()
    for _ in range(30):
        matcher, text = xgrammar.GrammarMatcher(grammar), ""
        mask = xgrammar.allocate_token_bitmask(1, len(texts))
        while True:
            matcher.fill_next_token_bitmask(mask)
            allowed = [each for each in range(len(texts)) if int(mask[0, each // 32]) >> (each % 32) & 1]
            token = rng.choice(allowed)
            matcher.accept_token(token)
            if token == len(texts) - 1:
                break
            text += texts[token]
        reasoning, content, calls = taken_apart(form.parser(True, ""), [text])
        assert not reasoning and not content.strip() and calls, text
        counts.add(len(calls))
        for called, arguments in calls:
            assert called in ("f", "g_2") and json.loads(arguments)["a"] in ("x", 'y"}')
    assert (max(counts) > 1) == (is_parallel and name != "harmony")
