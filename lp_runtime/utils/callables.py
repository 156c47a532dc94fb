"""Callables that many layers pass on: a check that is never true, and the result of a generator."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


def never() -> bool:
    """Default of arguments such as `should_cancel`, which are asked whether to stop."""
    return False


def result_of(chunks: Generator[object, None, Result]) -> Result:
    """Run a generator to its end and return its return value; yielded values are dropped."""
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            return end.value
