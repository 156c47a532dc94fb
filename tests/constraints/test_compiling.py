"""What is refused, where, and within which time."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from support.constrained import EOS, TEXTS, compile_for_test, tokenizer

from lp_runtime.config.constraint import MAX_SOURCE_CHARS, ConstraintConfig
from lp_runtime.constraints import compiled
from lp_runtime.constraints.compile_process import ConstraintCompiler
from lp_runtime.constraints.schema_checks import check_schema
from lp_runtime.errors import ConfigError, ConstraintError

OBJECT = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"json_schema": {"type": "objct"}}, 'Unsupported type "objct"'),
        ({"json_schema": "[1"}, "constraint.json_schema: must be a JSON object"),
        ({"json_schema": False}, "cannot accept any value"),
        ({"json_schema": OBJECT}, "no text can satisfy it: the rule root never ends"),
        ({"json_schema": {"properties": {"a/b": {"not": {}}}}}, "#/properties/a/b/not: is not supported"),
        ({"json_schema": {"items": {"anyOf": [{}], "type": "string"}}}, "#/items/type: is not supported beside anyOf"),
        ({"json_schema": {"type": "string", "pattern": "a", "maxLength": 3}}, "#/maxLength"),
        ({"json_schema": {"type": "string", "enum": ["a", 1]}}, "#/enum: 1 is not of type string"),
        ({"json_schema": {"type": "object", "required": ["x"]}}, "'x' is not among the properties"),
        ({"json_schema": {"type": "string", "pattern": "(("}}, "parenthesis is not closed"),
        ({"regex": "(("}, "constraint.regex: Regex parsing error"),
        ({"grammar": "root ::= b"}, 'Rule "b" is not defined'),
        ({"grammar": 'root ::= "b" | "a" loop\nloop ::= "a" loop'}, "the rule loop never ends"),
        ({"regex": "é"}, "no token of the model's vocabulary can begin"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice are given"),
        ({"choice": []}, "must be a list of texts"),
        ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "must be at most"),
        ({"structural_tag": {"x": 1}}, "structural_tag"),
    ],
)
def test_what_is_refused_in_one_line(settings, place):
    with pytest.raises(ConstraintError) as refused:
        compile_for_test(ConstraintConfig(**settings))
    assert place in str(refused.value) and "\n" not in str(refused.value)


def test_a_schema_nested_too_deep():
    schema: dict = {}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(ConstraintError, match="nested deeper"):
        check_schema(schema)


def test_the_process_survives_what_takes_too_long():
    compiler = ConstraintCompiler(tokenizer, len(TEXTS), {EOS}, seconds=20.0)
    try:
        first = compiler.compile(ConstraintConfig(regex="ab"))
        assert compiler.compile(ConstraintConfig(regex="ab")) is first
        (child,) = [each for each in psutil.Process().children() if "compile_process" in " ".join(each.cmdline())]
        os.kill(child.pid, signal.SIGSTOP)  # as one that compiles for long
        compiler.seconds = 0.1
        with pytest.raises(ConstraintError, match="takes longer than 0.1 s"):
            compiler.compile(ConstraintConfig(regex="cd"))
        assert not child.is_running()
        assert compiler.compile(ConstraintConfig(regex="ab")) is first  # kept
    finally:
        compiler.close()


def test_a_model_without_an_end_and_a_missing_package(monkeypatch):
    with pytest.raises(ConfigError, match="end-of-sequence"):
        ConstraintCompiler(tokenizer, len(TEXTS), set()).compile(ConstraintConfig(regex="a"))
    compiled.library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"pip install 'lp-runtime\[constraints\]'"):
        ConstraintCompiler(tokenizer, len(TEXTS), {EOS}).compile(ConstraintConfig(regex="a"))
    compiled.library.cache_clear()
