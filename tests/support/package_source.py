"""The package's source files, each parsed once, for tests of rules that hold for all of them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import lp_runtime

PACKAGE = Path(lp_runtime.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


@functools.cache
def parsed(name: str) -> ast.Module:
    """Return the syntax tree of a file of the package."""
    return ast.parse((PACKAGE / name).read_text())


@functools.cache
def nodes_of(name: str) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(parsed(name)))
