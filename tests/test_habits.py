"""Conventions that a reader of the package relies on, checked in its source."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections.abc import Iterable

from support.package_source import FILES, NAMES, PACKAGE, nodes_of

MAX_LINES = 450
MAX_PARAMETERS = 7
PUBLIC_API = ("runtime.py", "dropin/lookahead_generate.py")
MAKERS = ("__init__", "__post_init__", "__new__")
MAX_ATTRIBUTES = 15
# Words that no name may contain: they say how a value came about, or where it is, and not what it is.
RETIRED_WORDS = {"found", "told", "take", "taken", "draw", "drawn", "room", "price"}
RETIRED_WORDS |= {"behind", "beside", "anew", "alike", "nobody", "whoever"}
NAMES_OF_OTHERS = {"found_by", "take_along_axis"}  # a field of traces that clients read; numpy


@functools.cache
def classes(name: str) -> list[ast.ClassDef]:
    return [node for node in nodes_of(name) if isinstance(node, ast.ClassDef)]


def all_classes() -> list[tuple[str, ast.ClassDef]]:
    """Return (file, class) of every class of the package."""
    return [(name, kind) for name in NAMES for kind in classes(name)]


def self_attributes(node: ast.AST) -> set[str]:
    """Return the names that are assigned on `self`."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def declared(kind: ast.ClassDef) -> set[str]:
    """Return a class's attributes after `__init__`: fields, slots, class and instance attributes."""
    results: set[str] = set()
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            results.add(node.target.id)
        elif isinstance(node, ast.Assign):
            results |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in MAKERS:
            results |= self_attributes(node)
    return results


def inherited(kind: ast.ClassDef) -> set[str]:
    bases = {base.id for base in kind.bases if isinstance(base, ast.Name)}
    results: set[str] = set()
    for name in NAMES:
        for other in classes(name):
            if other.name in bases and other is not kind:
                results |= declared(other) | inherited(other)
    return results


def test_files_are_short():
    lengths = {name: len((PACKAGE / name).read_text().splitlines()) for name in NAMES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def wrong_words(words: Iterable[str]) -> set[str]:
    return {word for word in {*words} - NAMES_OF_OTHERS if RETIRED_WORDS & set(word.lower().split("_"))}


def test_names_contain_no_retired_words():
    findings = []
    for name, path in zip(NAMES, FILES, strict=True):
        if not wrong_words(re.findall(r"\w+", path.read_text())):
            continue  # not even in its comments and strings
        with tokenize.open(path) as source:
            tokens = tokenize.generate_tokens(source.readline)
            wrong = wrong_words(token.string for token in tokens if token.type == tokenize.NAME)
        findings += [f"{name}: {word}" for word in sorted(wrong)]
    assert not findings


def test_attributes_are_first_set_in_init():
    # Cache layers are allocated lazily, as the protocol of transformers requires.
    findings = []
    for name, kind in all_classes():
        if any(isinstance(base, ast.Name) and base.id == "CacheLayerMixin" for base in kind.bases):
            continue
        known = declared(kind) | inherited(kind)
        for method in (node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            if late := self_attributes(method) - known:
                findings.append(f"{name}: {kind.name}.{method.name} sets {late}")
    assert not findings


def test_classes_set_few_attributes():
    findings = []
    for name, kind in all_classes():
        init = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if init and (number := len(self_attributes(init[0]))) > MAX_ATTRIBUTES:
            findings.append(f"{name}: {kind.name} sets {number} attributes")
    assert not findings


def assigned_attributes(node: ast.AST) -> int:
    """Return the number of attributes that a statement assigns at once."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return max(
        (sum(isinstance(each, ast.Attribute) for each in getattr(target, "elts", ())) for target in targets), default=0
    )


def test_statements_assign_at_most_two_attributes():
    findings = [f"{name}:{node.lineno}" for name in NAMES for node in nodes_of(name) if assigned_attributes(node) > 2]
    assert not findings


def parameters_of(function: ast.FunctionDef) -> int:
    """Return the number of parameters of a function, without self and cls."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_functions_have_few_parameters():
    """Exceptions: the public API, kernels, compiled code, and attention, with transformers' parameters."""
    findings = [
        f"{name}: {node.name}"
        for name in NAMES
        if not name.startswith(("kernels/", "model/attention/"))
        and name not in ("runtime.py", "dropin/lookahead_generate.py")
        for node in nodes_of(name)
        if isinstance(node, ast.FunctionDef) and parameters_of(node) > MAX_PARAMETERS
        if not any("compiled" in (text := ast.unparse(each)) or "inlined" in text for each in node.decorator_list)
    ]
    assert not findings
