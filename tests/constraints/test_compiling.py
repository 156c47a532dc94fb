"""Compilation of constraints: refusals with the place of the error, and limits on waiting."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from support.constrained import EOS, TEXTS, compile_for_test, tokenizer
from support.forked import COMPILER, living_processes
from support.processes import wait_until
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from lp_runtime.config.constraint import MAX_SOURCE_CHARS, ConstraintConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.constraints import compile_process
from lp_runtime.constraints.compile_process import MAX_PENDING, ConstraintCompiler
from lp_runtime.constraints.exact_schemas import exact_schema
from lp_runtime.constraints.grammar_guide import Grammars
from lp_runtime.constraints.library import TESTED_VERSION, library
from lp_runtime.errors import BusyError, ConfigError, ConstraintError, ReplicaError
from lp_runtime.request.request_options import RequestOptions
from lp_runtime.server.submission import Submitter

OBJECT = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"json_schema": {"type": "objct"}}, "#/type: 'objct' is not one or more of string, integer"),
        ({"json_schema": "[1"}, "constraint.json_schema: must be a JSON object"),
        ({"json_schema": False}, "cannot accept any value"),
        ({"json_schema": OBJECT}, "no text can satisfy it: the rule root never ends"),
        ({"json_schema": {"properties": {"a/b": {"not": {}}}}}, "#/properties/a~1b/not: is not supported"),
        (
            {"json_schema": {"items": {"anyOf": [{}], "type": "string"}}},
            "#/items/type: is not supported together with anyOf",
        ),
        ({"json_schema": {"type": "string", "pattern": "a", "maxLength": 3}}, "#/maxLength"),
        ({"json_schema": {"type": "string", "enum": ["a", 1]}}, "#/enum: 1 is not of type string"),
        ({"json_schema": {"type": "object", "required": ["x"]}}, "'x' is not among the properties"),
        ({"json_schema": {"type": "string", "pattern": "(("}}, "parenthesis is not closed"),
        ({"regex": "(("}, "constraint.regex: a parenthesis is not closed: '(('"),
        ({"grammar": "root ::= b"}, 'Rule "b" is not defined'),
        ({"grammar": 'root ::= "b" | "a" loop\nloop ::= "a" loop'}, "the rule loop never ends"),
        ({"regex": "é"}, "no token of the model's vocabulary can begin"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice are given"),
        ({"choice": []}, "must be a list of Unicode texts"),
        ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "must be at most"),
        ({"structural_tag": {"x": 1}}, "structural_tag"),
    ],
)
def test_invalid_constraint_is_refused_in_one_line(settings, place):
    with pytest.raises(ConstraintError) as refused:
        compile_for_test(ConstraintConfig(**settings))
    assert place in str(refused.value) and "\n" not in str(refused.value)


def test_schema_nested_too_deep_is_refused():
    schema: dict = {}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(ConstraintError, match="nested deeper"):
        exact_schema(schema)


@pytest.fixture
def compiler() -> Iterator[ConstraintCompiler]:
    """Return a compiler whose process has compiled `ab`."""
    compiler = ConstraintCompiler(tokenizer, len(TEXTS), {EOS}, seconds=60.0)
    try:
        compiler.compile(ConstraintConfig(regex="ab"))
        yield compiler
    finally:
        compiler.close()


def process() -> psutil.Process:
    """Return the process of the only compiler that runs."""
    (pid,) = living_processes(COMPILER)
    return psutil.Process(pid)


def test_compilation_timeout_ends_the_process_and_keeps_the_cache(compiler):
    first = compiler.compile(ConstraintConfig(regex="ab"))
    assert compiler.compile(ConstraintConfig(regex="ab")) is first
    child = process()
    os.kill(child.pid, signal.SIGSTOP)  # simulates a long compilation
    compiler.seconds = 0.1
    with pytest.raises(ConstraintError, match="takes longer than 0.1 s"):
        compiler.compile(ConstraintConfig(regex="cd"))
    assert not child.is_running()
    assert compiler.compile(ConstraintConfig(regex="ab")) is first  # still cached


def test_process_that_was_killed_while_idle_is_replaced(compiler):
    compiler.compile(ConstraintConfig(regex="ab"))
    process().kill()
    wait_until(lambda: not living_processes(COMPILER))
    assert compiler.compile(ConstraintConfig(regex="cd")).key == ConstraintConfig(regex="cd").key


def regex_options(regex: str) -> RequestOptions:
    return {"constraint": ConstraintConfig(regex=regex)}


def submitter(compiler: ConstraintCompiler) -> Submitter:
    """Return a Submitter that compiles the constraints of HTTP requests but cannot decode them."""
    return Submitter(
        SimpleNamespace(
            config=None,
            info=SimpleNamespace(vocabulary_size=len(TEXTS), defaults={"max_new_tokens": 8}),
            compiler=compiler,
        ),
        None,
        ServeConfig(),
        tokenizer(),
    )


def test_requests_above_the_compilation_limit_are_refused(compiler):
    """Requests above the limit are refused at once.

    Equal constraints count once; constraints that are already compiled do not count.
    """
    child, server = process(), submitter(compiler)

    async def ask() -> tuple[list[asyncio.Task], list[asyncio.Task]]:
        tasks = [asyncio.create_task(server.prepare(regex_options("a" * n))) for n in range(1, MAX_PENDING + 11)]
        again = [asyncio.create_task(server.prepare(regex_options("aa"))) for _ in range(10)]
        gone = asyncio.create_task(server.prepare(regex_options("aa")))
        for _ in range(3):
            await asyncio.sleep(0)
        try:
            assert not any(task.done() for task in [*tasks[:MAX_PENDING], *again])
            assert all(task.done() for task in tasks[MAX_PENDING:])
            async with asyncio.timeout(20):
                await server.prepare(regex_options("ab"))  # already compiled
            gone.cancel()
        finally:
            os.kill(child.pid, signal.SIGCONT)
        await asyncio.wait([*tasks, *again, gone])
        return tasks, again

    os.kill(child.pid, signal.SIGSTOP)
    tasks, again = asyncio.run(ask())
    assert [task.exception() for task in [*tasks[:MAX_PENDING], *again]] == [None] * (MAX_PENDING + 10)
    refused = [task.exception() for task in tasks[MAX_PENDING:]]
    assert {type(error) for error in refused} == {BusyError}
    assert {str(error) for error in refused} == {"32 other requests' constraints are already waiting to be compiled"}
    assert compiler.kept(ConstraintConfig(regex="a" * MAX_PENDING)) is not None
    assert compiler.kept(ConstraintConfig(regex="a" * (MAX_PENDING + 1))) is None


def test_compilation_wait_starts_with_the_request(compiler, monkeypatch):
    """All waiting requests are refused after WAIT_SECONDS, even if asyncio has a single thread."""
    monkeypatch.setattr(compile_process, "WAIT_SECONDS", 0.2)
    child, server = process(), submitter(compiler)

    async def ask() -> list[asyncio.Task]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        tasks = [asyncio.create_task(server.prepare(regex_options("a" * n))) for n in range(1, MAX_PENDING + 1)]
        try:
            async with asyncio.timeout(20):
                while sum(task.done() for task in tasks) < MAX_PENDING - 1:
                    await asyncio.sleep(0.01)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        await asyncio.wait(tasks)
        return tasks

    os.kill(child.pid, signal.SIGSTOP)
    actual = [task.exception() for task in asyncio.run(ask())]
    assert actual.count(None) == 1
    assert {str(each) for each in actual if each} == {
        "other requests' constraints have been compiling for more than 0.2 s"
    }


def test_recently_used_constraints_stay_cached(compiler, monkeypatch):
    first, second = (ConstraintConfig(regex=each) for each in ("ab", "cd"))
    num_bytes = len(compiler.compile(first).data) + len(compiler.compile(second).data)
    monkeypatch.setattr(compile_process, "MAX_KEPT_BYTES", num_bytes)
    assert compiler.kept(first) is not None
    third = ConstraintConfig(regex="ef")
    compiler.compile(third)
    assert [compiler.kept(each) is not None for each in (first, second, third)] == [True, False, True]


@pytest.mark.slow
def test_closed_compiler_starts_no_process(started_compilers, compiler):
    compiler.close()
    for ask in (compiler.submit, compiler.compile):
        with pytest.raises(ReplicaError, match="the runtime is closed"):
            ask(ConstraintConfig(regex="cd"))
    assert not any("compile_process" in " ".join(each.cmdline()) for each in psutil.Process().children())


def joining_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that decodes a token's last letter `a` as a space, except at the end of a text."""
    tokens = copy.deepcopy(tokenizer())
    tokens.backend_tokenizer.decoder = decoders.BPEDecoder("a")
    return tokens


def test_tokenizer_with_context_dependent_tokens_is_refused():
    constraint = compile_for_test(ConstraintConfig(regex="a"))
    with pytest.raises(ConfigError, match="the text of its tokenizer's token .* depends on the token before it") as one:
        ConstraintCompiler(joining_tokenizer, len(TEXTS), {EOS}).compile(ConstraintConfig(regex="a"))
    with pytest.raises(ConfigError) as other:
        Grammars(joining_tokenizer, len(TEXTS), {EOS}).guide(constraint)
    assert str(one.value) == str(other.value) and "\n" not in str(one.value)


def test_missing_eos_token_or_package_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="end-of-sequence"):
        ConstraintCompiler(tokenizer, len(TEXTS), set()).compile(ConstraintConfig(regex="a"))
    library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"pip install 'lp-runtime\[constraints\]'"):
        ConstraintCompiler(tokenizer, len(TEXTS), {EOS}).compile(ConstraintConfig(regex="a"))
    library.cache_clear()


def test_untested_version_of_xgrammar_is_refused(monkeypatch):
    monkeypatch.setattr("lp_runtime.constraints.library.version", lambda name: "0.2.9")
    with pytest.raises(ConfigError, match=f"xgrammar 0.2.9 is installed.* pip install xgrammar=={TESTED_VERSION}$"):
        library.__wrapped__()
