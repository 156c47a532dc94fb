"""Reader for prompts in JSON-lines files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lp_runtime.errors import ConfigError

MULTI_TURN = "multi-turn"  # Spec-Bench's category name for conversations


@dataclass(frozen=True)
class Prompt:
    """One record of a prompts file."""

    index: int  # among the records, from 0
    line: int  # in the file, from 1
    value: str | list[int]  # text or token ids; for a conversation, its first turn
    turns: tuple[str, ...] = ()  # texts of the user's turns; just the text if the field holds one; empty with token ids
    category: str = ""  # the record's field `category`; the file's name without its suffix if there is none
    path: str = field(default="", compare=False)  # of the file

    @property
    def where(self) -> str:
        """Place of the prompt, for messages."""
        return f"{self.path} line {self.line}"

    @property
    def task(self) -> str:
        """Category as Spec-Bench groups prompts: "multi-turn" for several turns, else `category`."""
        return MULTI_TURN if len(self.turns) > 1 else self.category


def read_prompts(path: str, field: str, limit: int | None = None, are_ids: bool = False) -> list[Prompt]:
    """Read the prompts of a JSON-lines file, skipping blank lines.

    `field` holds the prompt: text in all records, in all records a list of texts (the turns of a conversation), or with
    `are_ids` token ids.
    """
    prompts: list[Prompt] = []
    shape = ""  # type of the first record's field, in words
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
    """Raise a ConfigError that names `path` and `field` if no prompt has several turns (turns=all)."""
    if all(len(prompt.turns) <= 1 for prompt in prompts):
        raise ConfigError(f"turns=all: field {field!r} of {path} holds no conversation of several turns")


def _prompt(text: str, field: str, are_ids: bool, index: int, line: int, path: str) -> tuple[Prompt, str]:
    """Return the prompt of one line, and the type of its field in words."""
    where = f"{path} line {line}"
    record = _record(text, field, where)
    category, value = str(record.get("category", Path(path).stem)), record[field]
    if are_ids:
        return Prompt(index, line, parse_ids(value, f"{where}: {field}"), (), category, path), "token ids"
    turns = _turns(value, field, where)
    return Prompt(index, line, turns[0], turns, category, path), "a list" if isinstance(value, list) else "text"


def _record(text: str, field: str, where: str) -> dict[str, Any]:
    """Parse one line into a record that has the field; `where` starts the error messages."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    if not isinstance(record, dict) or field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{where}: has no field {field!r} (prompt_field=); it has: {fields}")
    return record


def _turns(value: object, field: str, where: str) -> tuple[str, ...]:
    """Return the texts of a field, at least one; `where` starts the error messages."""
    texts = tuple(value) if isinstance(value, list) else (value,)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}: field {field!r} must hold text (or with ids=true token ids)")
    return texts


def parse_ids(value: object, name: str) -> list[int]:
    """Return token ids given as a list or its JSON text; ConfigError, with `name`, for anything else."""
    try:
        ids = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{name}={json.dumps(value)[:40]}: with ids=true it must be a JSON list of token ids")
    return ids
