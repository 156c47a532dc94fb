"""Helpers for generators that yield progress and return a result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


def result_of(chunks: Generator[object, None, Result]) -> Result:
    """Run a generator to its end and return its return value; yielded values are dropped."""
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            return end.value
