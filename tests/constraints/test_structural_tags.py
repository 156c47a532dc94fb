"""JSON of any characters is exact wherever a schema is used: formats, tools, structural tags, harmony."""

from __future__ import annotations

import functools
import random

import jsonschema
import numpy as np
import pytest
from support.bytewise import allows
from support.random_schemas import PATHS, random_schema, random_tokens, texts_of
from support.thinned import slow, thinned

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.constraints.compiled import compile_constraint
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.errors import ConstraintError
from lp_runtime.model.loading.loader import load_tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "ße": {"type": "boolean"},
        "café1": {"enum": ["Grüße", "\x81f"]},
        "p": {"type": "string", "pattern": "^[éa]{4}$"},
        "ÿ0😀\n": {"const": {"\u2028é": ["ü\0"]}},
    },
    "required": ["ße", "café1", "p", "ÿ0😀\n"],
}
JSON = '{"ße": false, "café1": "Grüße", "p": "éaéa", "ÿ0😀\\n": {"\u2028é":["ü\\u0000"]}}'
OTHER = {"ße": "\u0dfe", "café1": "caf\u0e91", ": ": ":"}  # printed names as xgrammar misreads them; other whitespace
BEGIN, END = "<tç😀>", "</é1>"
SCHEMA = {"type": "json_schema", "json_schema": RECORD}
NULL = {"type": "json_schema", "json_schema": {"type": "null"}}
TAG = {"type": "tag", "begin": BEGIN, "content": SCHEMA, "end": END}
CALL = f"{BEGIN}{JSON}{END}"
SEPARATED = {"type": "tags_with_separator", "tags": [TAG], "separator": "é1, "}
FREE = {"type": "tag", "begin": "<é>", "content": {"type": "any_text"}, "end": "</é>"}


@functools.cache
def grammars() -> Grammars:
    """Return a factory of guides for the demo model's vocabulary, which has all bytes."""
    tokenizer = load_tokenizer(ModelConfig(path=None))
    return Grammars(lambda: tokenizer, len(tokenizer), {tokenizer.eos_token_id})


def structural(part: dict, **options: str) -> ConstraintConfig:
    return ConstraintConfig(structural_tag={"type": "structural_tag", "format": part}, **options)


@pytest.mark.parametrize("seed", slow(range(3), [2]))
@pytest.mark.parametrize("name", thinned(2, PATHS))
def test_random_texts_of_every_path_satisfy_the_schema(name, seed):
    """Texts consist of random tokens of a byte-level vocabulary; jsonschema and json validate them."""
    schema = random_schema(random.Random(seed)) if seed else RECORD
    path = PATHS[name](schema)
    vocabulary = grammars().vocabulary(path.constraint.kind == "structural_tag")
    compiled = compile_constraint(path.constraint, vocabulary.info)
    rng = np.random.default_rng(seed)
    tokens = random_tokens(grammars().guide(compiled), vocabulary, path.prefix, rng)
    values = path.values(b"".join(texts_of(vocabulary)[token] for token in tokens).decode())
    assert values
    for value in values:
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("part", "allowed", "refused"),
    [
        (TAG, [CALL], [JSON, CALL + END]),
        (SEPARATED, ["", CALL, f"{CALL}é1, {CALL}"], [f"{CALL}é1, ", CALL * 2]),
        ({**SEPARATED, "at_least_one": True}, [CALL, f"{CALL}é1, {CALL}"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", CALL], [f"{CALL}é1, {CALL}"]),
        ({**SEPARATED, "at_least_one": True, "stop_after_first": True}, [CALL], ["", f"{CALL}é1, {CALL}"]),
        ({**SEPARATED, "separator": ""}, ["", CALL * 3], [f"{CALL}é1, {CALL}"]),
        ({**SEPARATED, "tags": [{**TAG, "end": [END, ""]}]}, [CALL, BEGIN + JSON], [BEGIN + END]),
        ({"type": "optional", "content": NULL}, ["", "null"], ["nullnull"]),
        ({"type": "star", "content": {"type": "star", "content": NULL}}, ["", "nullnull"], ["n"]),
        ({"type": "plus", "content": NULL}, ["null", "nullnull"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": NULL}, ["null", "nullnull"], ["", "null" * 3]),
        ({"type": "repeat", "min": 2, "max": -1, "content": NULL}, ["null" * 5], ["null"]),
        (
            {"type": "or", "elements": [{"type": "sequence", "elements": [FREE, TAG]}, NULL]},
            [f"<é>ß</é1</é>{CALL}", "null"],
            [CALL, f"<é></é>b</é>{CALL}"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "any_text", "max_chars": 2}, TAG]},
            [CALL, f"éß{CALL}"],
            [f"éßa{CALL}"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": r"[\xe91]"}, NULL]},
            ["énull", "1null"],
            ["\u0e91null"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "grammar", "grammar": r'root ::= "\xe91"'}, NULL]},
            ["é1null"],
            ["\u0e91null"],
        ),
    ],
)
def test_structural_tag_parts_allow_and_refuse_the_right_texts(part, allowed, refused):
    is_allowed = allows(structural(part))
    for text in allowed:
        assert is_allowed(text), text
        assert not any(is_allowed(text.replace(right, other)) for right, other in OTHER.items() if right in text)
    assert not any(map(is_allowed, refused))


@pytest.mark.parametrize(
    ("part", "before", "after"),
    [
        ({"type": "triggered_tags", "triggers": ["<t"], "tags": [TAG]}, "ß<", " y"),
        ({"type": "dispatch", "rules": [[BEGIN, {"type": "sequence", "elements": [SCHEMA]}]]}, "ß", ""),
        ({**TAG, "content": {"type": "sequence", "elements": [SCHEMA, {"type": "any_text"}]}}, "", ""),
        ({**TAG, "content": {**SCHEMA, "max_whitespace_cnt": 2}}, "", ""),
        ({**TAG, "content": {**SCHEMA, "excludes": ["q"]}}, "", ""),
    ],
)
def test_unconverted_parts_are_exact_with_any_whitespace(part, before, after):
    is_allowed = allows(structural(part))
    end = "" if part["type"] == "dispatch" else END
    for text in (JSON, JSON.replace(": ", "\n: ")):
        assert is_allowed(f"{before}{BEGIN}{text}{end}{after}")
        assert not is_allowed(f"{before}{BEGIN}{text.replace('ße', OTHER['ße'])}{end}{after}")
        assert not is_allowed(f"{before}{BEGIN}{text.replace('false', 'null')}{end}{after}")


def test_whitespace_and_order_options_are_applied():
    is_allowed = allows(structural(TAG, whitespace="any"))
    assert is_allowed(CALL) and is_allowed(CALL.replace(": ", "\n:"))
    two = {"type": "object", "properties": {"é": {"type": "null"}, "ß": {"type": "null"}}, "required": ["é", "ß"]}
    is_allowed = allows(structural({"type": "json_schema", "json_schema": two, "any_order": True}))
    assert is_allowed('{"ß": null, "é": null}') and not is_allowed('{"ß":null,"é":null}')


def test_reasoning_part_is_allowed_before_the_json():
    is_allowed = allows(ConstraintConfig(json_schema=RECORD, reasoning_begin="<ç1>", reasoning_end="</ç1>"))
    assert is_allowed(JSON) and is_allowed(f"<ç1>ß</ç</ç1>\n{JSON}") and not is_allowed(f"<ç1>ß</ç1>b{JSON}")
    assert not is_allowed("\n" + JSON)  # without reasoning, only what the constraint allows


def test_xml_style_schema_has_exact_patterns():
    schema = {
        "type": "object",
        "properties": {"ße": {"type": "string", "pattern": r"^[\u00e9a]{2}$"}},
        "required": ["ße"],
    }
    is_allowed = allows(structural({"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}))
    assert is_allowed("<parameter=ße>éa</parameter>") and not is_allowed("<parameter=ße>\u0e9aa</parameter>")
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^é"}}, "required": ["a"]}
    is_allowed = allows(structural({"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}))
    assert is_allowed("<parameter=a>éb c</parameter>") and not is_allowed("<parameter=a>aé</parameter>")
    assert not is_allowed("<parameter=a>é</parameter></parameter>")


@pytest.mark.parametrize(("limit", "allowed", "refused"), [("maxItems", "[1]", "[1, 2]"), ("minItems", "[1]", "[]")])
def test_array_of_xml_style_schema_may_have_any_items(limit, allowed, refused):
    schema = {"type": "object", "properties": {"a": {"type": "array", limit: 1}}, "required": ["a"]}
    is_allowed = allows(structural({"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}))
    assert is_allowed(f"<parameter=a>{allowed}</parameter>") and not is_allowed(f"<parameter=a>{refused}</parameter>")


def test_forced_tokens_cover_the_certain_text():
    guide = grammars().guide(compile_constraint(structural(TAG), grammars().vocabulary(True).info))
    vocabulary = grammars().vocabulary(True)
    text = f'{BEGIN}{{"ße": '.encode()
    tokens = guide.forced(100)
    assert b"".join(texts_of(vocabulary)[token] for token in tokens) == text


LOOP = {"type": "grammar", "grammar": 'root ::= "a" loop\nloop ::= "b" loop'}


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({**TAG, "content": {"type": "or", "elements": [NULL, LOOP]}}, "no text can end: the rule loop never ends"),
        ({**TAG, "content": {**SCHEMA, "json_schema": {"not": {}}}}, "constraint.json_schema: #/not: is not supported"),
        (
            {**TAG, "content": {**SCHEMA, "json_schema": {"type": "x"}}},
            "constraint.json_schema: #/type: 'x' is not one or more of",
        ),
        ({"type": "sequence", "elements": [TAG, 5]}, "constraint.structural_tag: "),
        ({"type": "sequence", "elements": "é"}, "constraint.structural_tag: "),
        ({**TAG, "begin": 5}, "constraint.structural_tag: "),
        ({**TAG, "end": []}, "end array cannot be empty"),
        ({**TAG, "content": {"type": "star", "content": TAG}, "end": ""}, "at least one end string must be non-empty"),
        ({"type": "sequence", "elements": [TAG, {"type": "é"}]}, "constraint.structural_tag: "),
        (
            {"type": "or", "elements": [NULL, {"type": "regex", "pattern": "[é"}]},
            "structural_tag: a character",
        ),
    ],
)
def test_invalid_structural_tag_is_refused_in_one_line(part, reason):
    with pytest.raises(ConstraintError) as refused:
        allows(structural(part))
    assert reason in str(refused.value) and "\n" not in str(refused.value)
