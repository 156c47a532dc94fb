"""Answers with tool calls (recorded, random and constrained), and how a parser reads them.

PYTHONPATH=.:tests python -m support.tool_answers 2000    checks 2,000 random answers of each format, and prints a table
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from lp_runtime.chat.chat_format import ChatFormat, Tool, ToolUse
from lp_runtime.chat.formats import FORMATS
from lp_runtime.model.chat_template import ChatTemplate
from support.constrained_texts import texts_of
from support.tool_formats import SAMPLES

QUESTION = {"role": "user", "content": "How is the weather?"}


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema that a value follows."""
    if isinstance(value, Mapping):
        return {
            "type": "object",
            "properties": {key: schema_of(each) for key, each in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", **({"items": schema_of(value[0])} if value else {})}
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": names[type(value)]}


def tools_of(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Tool]:
    """Return tools for calls; several calls of one tool have equal types."""
    functions = [{"name": name, "parameters": schema_of(value)} for name, value in dict(calls).items()]
    return [{"type": "function", "function": function} for function in functions]


def parts_of(parser: Any, texts: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return reasoning, text and calls of an answer that arrives in several texts."""
    pieces = [piece for text in texts for piece in parser.add(text)] + parser.finish()
    texts_of = {kind: "".join(each.text for each in pieces if each.kind == kind) for kind in ("reasoning", "content")}
    names = {each.call: each.name for each in pieces if each.name is not None}
    calls = [
        (name, "".join(each.text for each in pieces if each.kind == "arguments" and each.call == call))
        for call, name in names.items()
    ]
    return texts_of["reasoning"], texts_of["content"], [(name, json.loads(text)) for name, text in calls]


def history_of(name: str, form: ChatFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls as the format's template writes them in the history."""
    ids = [f"functions.{called}:{i}" if name == "kimi_k2" else f"call{i:05}" for i, (called, _) in enumerate(calls)]
    written = [
        {"id": each, "type": "function", "function": {"name": called, "arguments": arguments}}
        for each, (called, arguments) in zip(ids, calls, strict=True)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": written}
    text = ChatTemplate(SAMPLES[name].template.text).render(form.history([QUESTION, message]))
    return text.partition("weather?)\n")[2].removeprefix(SAMPLES[name].template.begin)


WORDS = (
    *("", " a ", "true", "7", "{}", '"', "\\", "\\n", "a\nb", "\n", "'", "x='y'", '{"a": [1, "}"]}', "]", ")", "}"),
    *("<", "</", "<tool_call>", "</tool_call", "</param", "<parameter=a>", "</think>", "[TOOL_CALLS]", "[ARGS]", "```"),
    *("é", "北京", "🎉", "\u2028", "<|end|", "<|call|>", ", ", ": ", "\t", "f(a=1)", "\\u00e9", "&lt;"),
)


def random_value(rng: random.Random, depth: int = 2) -> tuple[Any, dict[str, Any]]:
    """Return a value and a schema that it follows."""
    kind = rng.choice(("text", "text", "text", "integer", "number", "boolean", "enum", "nullable", "list", "object"))
    text = "".join(rng.choices(WORDS, k=rng.randint(0, 4)))
    if kind == "text" or not depth:
        return text, {"type": "string"}
    if kind == "integer":
        return rng.randint(-(10**12), 10**12), {"type": "integer"}
    if kind == "number":
        return rng.choice((0.5, -1e20, 3, 2.0)), {"type": "number"}
    if kind == "boolean":
        return rng.random() < 0.5, {"type": "boolean"}
    if kind == "enum":
        values = ["celsius", "7", "a b", 8, None]
        return rng.choice(values), {"enum": values}
    if kind == "nullable":
        return rng.choice((None, f"n{text}")), {"anyOf": [{"type": "string"}, {"type": "null"}]}
    if kind == "list":
        value, schema = random_value(rng, depth - 1)
        return [value] * rng.randint(0, 2), {"type": "array", "items": schema}
    return random_object(rng, depth - 1)


def random_object(rng: random.Random, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = rng.sample(("a", "b_c", "name", "arguments", "x1"), rng.randint(0, 3))
    members = {key: random_value(rng, depth) for key in keys}
    values = {key: value for key, (value, _) in members.items()}
    return values, {"type": "object", "properties": {key: schema for key, (_, schema) in members.items()}}


# Texts that end an argument in a format without escapes.
ENDS = {
    **{name: "</parameter>" for name in ("qwen3_coder", "seed_oss", "minimax_m2")},
    "glm": "</arg_value>",
    "gemma": '<|"|>',
    "functiongemma": "<escape>",
}


BEFORE = ("", "I look. ", "a < b, [c] and {d}", "北京\n\n", "<b>", "1 </")  # texts before calls


def random_answer(name: str, form: ChatFormat, rng: random.Random) -> tuple[str, tuple[str, str, Any], list[Tool]]:
    """Return (text, parts, tools) of a random answer with calls, as the format's template writes them."""
    called = [(rng.choice(("f", "get_it", "a-b.c")), *random_object(rng, 3)) for _ in range(rng.randint(1, 3))]
    called = list({tool: (tool, arguments, schema) for tool, arguments, schema in called}.values())
    calls = [(tool, arguments) for tool, arguments, _ in called]
    tools = [{"type": "function", "function": {"name": tool, "parameters": schema}} for tool, _, schema in called]
    text, content, thought = history_of(name, form, calls), "", ""
    if FORMATS[name].mark and not form.is_harmony:
        content = rng.choice(BEFORE)
        text = content + text
    if form.reasoning is not None and rng.random() < 0.5:
        thought = "".join(rng.choices(BEFORE, k=2))
        text = form.reasoning.begin + thought + form.reasoning.end + rng.choice(("", "\n\n")) + text
    return text, (thought, content, calls), tools


def wrong_random_answers(name: str, num: int, seed: int) -> list[str]:
    """Return random answers that are read back wrong, whether whole, cut at random, or cut everywhere."""
    rng, wrong, form = random.Random(f"{name} {seed}"), [], ChatFormat(SAMPLES[name].template.text)
    for _ in range(num):
        text, (thought, content, calls), tools = random_answer(name, form, rng)
        if ENDS.get(name, "\0") in json.dumps(calls, ensure_ascii=False).replace('\\"', '"'):
            continue
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
        cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for texts in ([text], cut, list(text)):
            try:
                read = parts_of(form.parser(tools, ""), texts)
            except ValueError as error:
                read = (thought, content, error)
            # The template's text after the calls counts as text, too.
            if (read[0], read[2]) != (thought, calls) or not read[1].startswith(content.strip()):
                wrong.append(f"{text!r}: {read}, not {(thought, content, calls)}")
    return wrong


SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"enum": ["x", "y z"]},
            "b": {"type": "boolean"},
            "n": {"type": ["integer", "null"]},
            "t": {"type": "string"},
        },
        "required": ["a", "t"],
        "additionalProperties": False,
    },
    "g_2": {
        "type": "object",
        "properties": {
            "l": {"type": "array", "items": {"enum": ["red", 7]}, "maxItems": 2},
            "o": {"$ref": "#/$defs/o"},
        },
        "$defs": {"o": {"type": "object", "properties": {"k": {"type": "number"}}, "additionalProperties": False}},
        "additionalProperties": False,
    },
    "none": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


def follows_schemas(calls: Sequence[tuple[str, Any]]) -> bool:
    """Return whether there are calls, all of TOOLS, with valid arguments."""
    return bool(calls) and all(
        name in SCHEMAS and jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(arguments)
        for name, arguments in calls
    )


def constrained_calls(name: str, is_parallel: bool, num: int, seed: int = 1) -> tuple[list[str], set[int]]:
    """Return (wrong texts, numbers of calls) of random texts that must be calls of TOOLS."""
    form, wrong, counts = ChatFormat("", name, "none"), list[str](), set[int]()
    for text in texts_of(form.constraint(ToolUse(TOOLS, True, is_parallel), None, "", may_think=False), num, seed):
        reasoning, content, calls = parts_of(form.parser(TOOLS, ""), [text])
        in_characters = parts_of(form.parser(TOOLS, ""), list(text))[2]
        if reasoning or content.strip() or in_characters != calls or not follows_schemas(calls):
            wrong.append(text)
        counts.add(len(calls))
    return wrong, counts


def cut_answers(name: str, start: int = 0, step: int = 1) -> list[list[str]]:
    """Return the recorded answer of a format cut at each `step`-th place from `start` on, and at all places."""
    answer = SAMPLES[name].answer
    return [[answer[:place], answer[place:]] for place in range(start, len(answer) + 1, step)] + [list(answer)]


def read_recorded(name: str, form: ChatFormat, texts: Sequence[str]) -> Any:
    """Return the parts of a format's recorded answer that arrives in several texts."""
    return parts_of(form.parser(tools_of(SAMPLES[name].parts[2]), SAMPLES[name].prompt_end), texts)


def main(num: int) -> None:
    """Print how many answers of each format are read wrong, and their total."""
    print("| format | recorded, cut anywhere | of the history, at random | constrained |\n| --- | --- | --- | --- |")
    for name in SAMPLES:
        form, cut = ChatFormat(SAMPLES[name].template.text), cut_answers(name)
        recorded = sum(read_recorded(name, form, texts) != SAMPLES[name].parts for texts in cut)
        history = len(wrong_random_answers(name, num, 2))
        constrained = len(constrained_calls(name, True, num // 10)[0])
        print(f"| {name} | {recorded} of {len(cut)} | {history} of {num} | {constrained} of {num // 10} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
