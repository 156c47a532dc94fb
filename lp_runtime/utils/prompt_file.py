"""Prompts from a JSON-lines file."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lp_runtime.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One record of a prompts file.

    Attributes:
        index: index among the records, from 0.
        line: line in the file, from 1.
        value: the prompt's text, or its token ids.
    """

    index: int
    line: int
    value: str | list[int]


def read_prompts(path: str, field: str, limit: int | None = None, are_ids: bool = False) -> list[Prompt]:
    """Read the prompts of a JSON-lines file; blank lines are skipped.

    Args:
        path: the file.
        field: name of the field of each record that holds the prompt; if it holds a list, the first element is the
            prompt.
        limit: largest number of prompts to read; None for all.
        are_ids: whether the field holds token ids instead of text.

    Raises:
        ConfigError: if the file is missing or empty, or a line is not JSON or lacks the field; names the line.
    """
    prompts: list[Prompt] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if len(prompts) == limit:
                    break
                if text.strip():
                    prompts.append(Prompt(len(prompts), number, _value(text, field, are_ids, f"{path} line {number}")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not prompts:
        raise ConfigError(f"prompts={path}: the file has no prompts")
    return prompts


def _value(text: str, field: str, are_ids: bool, where: str) -> str | list[int]:
    """Return the prompt of one line; `where` begins the messages of its errors."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    if not isinstance(record, dict) or field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{where}: has no field {field!r} (prompt_field=); it has: {fields}")
    value = record[field]
    if are_ids:
        return parse_ids(value, f"{where}: {field}")
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: field {field!r} must hold text (or with ids=true token ids)")
    return value


def parse_ids(value: object, name: str) -> list[int]:
    """Return token ids given as a list, or as the text of a JSON list.

    Args:
        value: the list or its text.
        name: where the value stood, for the error's message.

    Raises:
        ConfigError: if the value is anything else.
    """
    try:
        ids = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{name}={json.dumps(value)[:40]}: with ids=true it must be a JSON list of token ids")
    return ids
