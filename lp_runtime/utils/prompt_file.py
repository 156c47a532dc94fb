"""Prompts from a JSON-lines file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lp_runtime.errors import ConfigError

MULTI_TURN = "multi-turn"  # Spec-Bench's name for the kind of prompt that its conversations are


@dataclass(frozen=True)
class Prompt:
    """One record of a prompts file.

    Attributes:
        index: index among the records, from 0.
        line: line in the file, from 1.
        value: the prompt's text, or its token ids; of a conversation, its first turn.
        turns: texts of the user's turns; of a field that holds text, that text alone; empty with token ids.
        category: the record's field `category`; the file's name without its ending where it has none.
    """

    index: int
    line: int
    value: str | list[int]
    turns: tuple[str, ...] = ()
    category: str = ""

    @property
    def task(self) -> str:
        """Kind of prompt, as Spec-Bench groups them: multi-turn for conversations of several turns, else the
        category."""
        return MULTI_TURN if len(self.turns) > 1 else self.category


def read_prompts(path: str, field: str, limit: int | None = None, are_ids: bool = False) -> list[Prompt]:
    """Read the prompts of a JSON-lines file; blank lines are skipped.

    Args:
        path: the file.
        field: name of the field of each record that holds the prompt: text in every record, or in every record a list
            of texts, the turns of a conversation.
        limit: largest number of prompts to read; None for all.
        are_ids: whether the field holds token ids instead of text.

    Raises:
        ConfigError: if the file is missing or empty, or a line is not JSON or lacks the field, or its field is of
            another shape than the first one's; names the line.
    """
    prompts: list[Prompt] = []
    shape = ""  # of the first record's field
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, text in enumerate(file, start=1):
                if len(prompts) == limit:
                    break
                if text.strip():
                    prompt, its_shape = _prompt(text, field, are_ids, len(prompts), number, path)
                    shape = shape or its_shape
                    if its_shape != shape:
                        first = f"{shape}, as line {prompts[0].line}'s does"
                        raise ConfigError(f"{path} line {number}: field {field!r} must hold {first}")
                    prompts.append(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not prompts:
        raise ConfigError(f"prompts={path}: the file has no prompts")
    return prompts


def check_conversations(prompts: Sequence[Prompt], path: str, field: str) -> None:
    """Refuse, for turns=all, prompts of which none has more than one turn.

    Args:
        prompts: of the file.
        path: the file, for the error's message.
        field: the field that was read.

    Raises:
        ConfigError: names the field.
    """
    if all(len(prompt.turns) <= 1 for prompt in prompts):
        raise ConfigError(f"turns=all: field {field!r} of {path} holds no conversation of several turns")


def _prompt(text: str, field: str, are_ids: bool, index: int, line: int, path: str) -> tuple[Prompt, str]:
    """Return the prompt of one line, and what its field holds, in words."""
    where = f"{path} line {line}"
    record = _record(text, field, where)
    category, value = str(record.get("category", Path(path).stem)), record[field]
    if are_ids:
        return Prompt(index, line, parse_ids(value, f"{where}: {field}"), (), category), "token ids"
    turns = _turns(value, field, where)
    return Prompt(index, line, turns[0], turns, category), "a list" if isinstance(value, list) else "text"


def _record(text: str, field: str, where: str) -> dict[str, Any]:
    """Return the record of one line, which has the field; `where` begins the messages of its errors."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    if not isinstance(record, dict) or field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{where}: has no field {field!r} (prompt_field=); it has: {fields}")
    return record


def _turns(value: object, field: str, where: str) -> tuple[str, ...]:
    """Return the texts that a field holds, at least one; `where` begins the messages of its errors."""
    texts = tuple(value) if isinstance(value, list) else (value,)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}: field {field!r} must hold text (or with ids=true token ids)")
    return texts


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
