"""Prompts of latency-sensitive users: code edits, coding agents, extraction of records, chats.

A study's prompts accept the name of a workload in place of FILE:FIELD. Workloads are built from the folder --data with
humaneval.jsonl, classeval.jsonl and spec_bench.jsonl, and from files of this repository.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from lp_runtime.errors import ConfigError

Message = dict[str, str | None]

REPOSITORY = Path(__file__).resolve().parents[1]
AGENT_FILES = ("examples/minimal.py", "examples/streaming.py", "examples/structured_output.py")
AGENT_TURNS = 10
NUM_RECORDS = 40
EDITS = {
    "rename": "Rename `{name}` to `{name}_checked`.",
    "add a parameter": "Add a parameter `verbose=False` to `{name}`.",
    "add docstrings": "Add a docstring of one line to every function that has none, and type hints to `{name}`.",
    "fix a bug": "There is a misspelt name in `{name}`. Correct it.",
}


@dataclass(frozen=True)
class Task:
    """One prompt of a workload.

    Attributes:
        messages: roles and texts; an assistant's text of None stands for the model's own answer to the previous task.
    """

    kind: str
    messages: tuple[Message, ...]

    @property
    def has_own_answer(self) -> bool:
        """Whether the messages contain the model's own answer to the previous task."""
        return any(message["content"] is None for message in self.messages)

    def said(self, answer: str) -> list[Message]:
        """Return the messages; `answer` is the model's own answer to the previous task."""
        return [message | {"content": message["content"] or answer} for message in self.messages]

    @classmethod
    def of(cls, kind: str, *texts: str | None) -> Task:
        """Return a task whose texts alternate between user and assistant."""
        roles = ("user", "assistant")
        return cls(kind, tuple({"role": roles[place % 2], "content": text} for place, text in enumerate(texts)))


def code_edits(data: Path) -> Iterator[Task]:
    """Yield edits of ClassEval's classes and HumanEval's functions; answers repeat most of the code."""
    sources = [sorted(_field(data / f"{name}.jsonl"), key=len) for name in ("classeval", "humaneval")]
    codes = [text for texts in zip_longest(*sources) for text in texts if text is not None]
    kinds = list(EDITS)
    for number, code in enumerate(codes):
        names = re.findall(r"def ([^\W_]\w+)\(", code)
        if not names:
            continue
        kind, name = kinds[number // 2 % len(kinds)], names[-1]
        seen = _misspelt(code, name) if kind == "fix a bug" else code
        edit = EDITS[kind].format(name=name)
        yield Task.of(f"edit: {kind}", f"{edit} Answer with the whole code and nothing else.\n\n{_fenced(seen)}")


def asked_twice(data: Path) -> Iterator[Task]:
    """Yield code edits, each one twice in a row: the second time, the answer is known."""
    for task in code_edits(data):
        yield replace(task, kind="first time")
        yield replace(task, kind="second time")


def agent(data: Path) -> Iterator[Task]:
    """Yield turns of sessions in which an agent edits a file of this repository, runs it, and corrects it."""
    for path in AGENT_FILES:
        code = (REPOSITORY / path).read_text()
        names = list(dict.fromkeys(re.findall(r"\b([a-z_]{5,})\b(?= = |\()", code)))[: AGENT_TURNS // 2]
        texts: list[str | None] = []
        for name in names:
            texts.append(
                f"$ cat {path}\n{_fenced(code)}\nRename `{name}` to `{name}_new` in {path}. Answer with the whole file."
            )
            yield Task.of("agent: edit", *texts)
            code = re.sub(rf"\b{name}\b", f"{name}_new", code)
            line = 1 + next(place for place, text in enumerate(code.splitlines()) if f"{name}_new" in text)
            texts += [
                _fenced(code),
                f'$ python {path}\nTraceback (most recent call last):\n  File "{path}", line {line}, in <module>\n'
                f"NameError: name '{name}' is not defined\n\nOne place was missed. Answer with the whole file again.",
            ]
            yield Task.of("agent: retry", *texts)
            texts.append(_fenced(code))


def records(data: Path) -> Iterator[Task]:
    """Yield similar records to extract as JSON, each after the same instructions."""
    rng = random.Random(0)
    for number in range(NUM_RECORDS):
        order, day = 10_000 + 37 * number, f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        first, last = rng.choice(["Ana", "Ben", "Chloe", "Dmitri", "Emeka"]), rng.choice(["Silva", "Lee", "Novak"])
        city, item = rng.choice(["Lisbon", "Oslo", "Nairobi", "Quito"]), rng.choice(["lamp", "desk", "kettle"])
        quantity, price, delivery = rng.randint(2, 9), rng.randint(10, 400), rng.choice(["morning", "evening"])
        text = (
            f"Order {order} came in on {day}. {first} {last} of {city} wants {quantity} of our {item}s at {price}.50"
            f" each, and asks for delivery in the {delivery}."
        )
        keys = "order_id, date, customer (name, city), item, quantity, unit_price and delivery"
        yield Task.of(
            "records", f"Extract the order as JSON with the keys {keys}. Answer with the JSON only.\n\n{text}"
        )


def chats(data: Path) -> Iterator[Task]:
    """Yield both turns of Spec-Bench's conversations; the second follows the model's answer to the first."""
    for turns in _field(data / "spec_bench.jsonl", "turns"):
        if len(turns) > 1:
            yield Task.of("chat: first turn", turns[0])
            yield Task.of("chat: second turn", turns[0], None, turns[1])


WORKLOADS: dict[str, Callable[[Path], Iterator[Task]]] = {
    each.__name__: each for each in (code_edits, asked_twice, agent, records, chats)
}


def load_workload(name: str, data: Path, limit: int) -> list[Task]:
    """Return the first tasks of a workload.

    Raises:
        ConfigError: if there is no such workload, or a file that it needs cannot be read.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"--prompts {name}: must be FILE:FIELD or one of {', '.join(WORKLOADS)}")
    try:
        return [task for task, _ in zip(WORKLOADS[name](data), range(limit), strict=False)]
    except OSError as error:
        raise ConfigError(f"--data {data}: {error.filename}: {error.strerror}") from error


def find_file(name: str, data: Path) -> Path:
    """Return the path of a file of prompts: relative to the current folder, else to --data.

    Raises:
        ConfigError: if neither folder has it.
    """
    for path in (Path(name), data / name):
        if path.exists():
            return path
    raise ConfigError(f"--prompts {name}: there is no such file in {Path.cwd()}, nor in --data {data}")


def _field(path: Path, name: str = "prompt") -> list:
    return [json.loads(line)[name] for line in path.read_text().splitlines()]


def _fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def _misspelt(code: str, name: str) -> str:
    """Return the code with the first letters of a function's last parameter swapped in its declaration."""
    parameters = re.search(rf"def {name}\(([^)]*)\)", code)
    words = re.findall(r"\b\w{4,}\b(?= *[:,=)]|$)", parameters.group(1)) if parameters else []
    if not words:
        return code.replace(f"def {name}", f"def {name[1] + name[0] + name[2:]}", 1)
    wrong = words[-1][1] + words[-1][0] + words[-1][2:]
    start, end = parameters.span(1)  # type: ignore[union-attr]  # words come from it
    return code[:start] + code[start:end].replace(words[-1], wrong) + code[end:]


def texts_of(messages: Sequence[Message]) -> str:
    """Return a conversation as one text, for a model without a chat template."""
    return "\n\n".join(str(message["content"]) for message in messages)
