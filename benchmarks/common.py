"""Shared code of the benchmark commands: arguments, prompts, settings, results as JSON and Markdown.

A command (`python benchmarks/COMMAND.py STUDY ...`) runs one of its studies. A study is a module of benchmarks/studies/
with a docstring that says how to call it, `add_arguments(parser)`, and `run(args)`, which returns the exit status.
Importing this module makes tests/, scripts/ and experiments/ importable.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

import psutil
import torch
from workloads import WORKLOADS, Task, find_file, load_workload, texts_of

from lp_runtime import Generation, LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.errors import LookaheadError
from lp_runtime.model.hf.types import CausalLM
from lp_runtime.request.output import Event, Report, StepOutput
from lp_runtime.utils.prompt_file import Prompt, read_prompts

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path += [str(REPOSITORY / folder) for folder in ("tests", "scripts", "experiments")]

DATA = REPOSITORY.parent / "shared" / "data"  # folder of the workloads, the default of --data
GREEDY = SamplingConfig(temperature=0.0)  # also with a model whose defaults sample
SETTINGS = ("5,3,5", "7,5,7", "15,5,15")
REPLICA_MODULE = "lp_runtime.launchers.worker.replica_process"
Value = str | int | float | Sequence[float] | None
Row = dict[str, Value]


class Study(Protocol):
    """A module of benchmarks/studies/."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the study's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the study and return its exit status: 0 if every check passed."""


def run_command(
    command: str, description: str, studies: Mapping[str, str], arguments: Sequence[str] | None = None
) -> None:
    """Run the study that the command line names, and exit with its status.

    Args:
        command: file name of the command, for messages.
        description: help text of the command.
        studies: modules in benchmarks/studies/ by study name on the command line. Only the requested one is imported.
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        prog=command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=studies, help="`STUDY --help` lists its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the study")
    chosen = parser.parse_args(arguments)
    study = load_study(studies[chosen.study])
    with one_line_errors():
        sys.exit(study.run(study_parser(f"{command} {chosen.study}", study).parse_args(chosen.arguments)))


def load_study(module: str) -> Study:
    """Return the study in a module of benchmarks/studies/."""
    return cast(Study, importlib.import_module(f"studies.{module}"))


def study_parser(name: str, study: Study) -> argparse.ArgumentParser:
    """Return the parser of a study's arguments; `name` is the command and study, for messages."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=study.__doc__, formatter_class=raw)
    study.add_arguments(parser)
    add_output_argument(parser)
    return parser


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a LookaheadError raised inside it as one line on stderr, and exit with status 1."""
    try:
        yield
    except LookaheadError as error:
        sys.exit(f"error: {error}")


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="also write the results there, as JSON and .md")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add --model."""
    parser.add_argument("--model", default=None, help="directory or hub id; the demo model if not given")


def add_prompt_arguments(parser: argparse.ArgumentParser, limit: int = 40, max_new_tokens: int = 128) -> None:
    """Add --model, --prompts, --limit and --max-new-tokens.

    Args:
        parser: gets the arguments.
        limit: default number of prompts from each file.
        max_new_tokens: default number of new tokens.
    """
    add_model_argument(parser)
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE:FIELD",
        help=f"JSON-lines files and the field to read, or workloads: {', '.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, metavar="FOLDER", help="of FILE and of workloads; default %(default)s"
    )
    parser.add_argument("--limit", type=int, default=limit, help="lines per file, or tasks per workload")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)


def add_settings_argument(parser: argparse.ArgumentParser, settings: Sequence[str] = SETTINGS) -> None:
    """Add --settings, whose values `parse_setting` reads.

    Args:
        parser: gets the argument.
        settings: the default.
    """
    parser.add_argument(
        "--settings",
        nargs="+",
        default=settings,
        metavar="[DRAFTER:]W,N,G",
        help="or [DRAFTER:]auto, or tokens=NUMBER for fixed step tokens; default drafter: full",
    )


def add_shards_argument(parser: argparse.ArgumentParser) -> None:
    """Add --gpus-per-replica."""
    parser.add_argument("--gpus-per-replica", type=int, default=1, metavar="P", help="shards of each replica")


def load_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the first `limit` lines of every file, in order."""
    prompts: list[Prompt] = []
    for source in args.prompts:
        path, has_field, field = source.rpartition(":")
        if has_field:
            prompts += read_prompts(str(find_file(path, args.data)), field, args.limit)
            continue
        for task in load_workload(source, args.data, args.limit):
            if not task.has_own_answer:
                text, place = texts_of(task.messages), len(prompts)
                prompts.append(Prompt(place, place + 1, text, (text,), task.kind))
    return prompts


def load_tasks(args: argparse.Namespace) -> list[Task]:
    """Return up to `args.each` tasks of each kind, from the first `args.limit` of every file or workload.

    A prompt's kind is its task (lp_runtime/utils/prompt_file.py). A conversation's first turn is the prompt.
    A workload's tasks keep their kinds and their order.
    """
    tasks: list[Task] = []
    for source in args.prompts:
        path, has_field, field = source.rpartition(":")
        if has_field:
            prompts = read_prompts(str(find_file(path, args.data)), field, args.limit)
            tasks += [Task.of(prompt.task, prompt.turns[0]) for prompt in prompts]
        else:
            tasks += load_workload(source, args.data, args.limit)
    counts: Counter[str] = Counter()
    chosen = []
    for task in tasks:
        counts[task.kind] += 1
        if counts[task.kind] <= args.each:
            chosen.append(task)
    return chosen


def parse_setting(text: str) -> LookaheadConfig:
    """Return settings for [DRAFTER:]W,N,G, [DRAFTER:]auto or tokens=NUMBER; draft tables are per request."""
    if text.startswith("tokens="):
        return LookaheadConfig(tokens=int(text.removeprefix("tokens=")), draft_tables="request")
    drafter, _, sizes = text.rpartition(":")
    W, N, G = (None, None, None) if sizes == "auto" else map(int, sizes.split(","))
    return LookaheadConfig(W=W, N=N, G=G, drafter=drafter or "full", draft_tables="request")


def tokens_and_report(events: Iterable[Event]) -> tuple[list[int], Report]:
    """Return a request's new tokens and its report, from the events of an engine."""
    token_ids: list[int] = []
    for event in events:
        if isinstance(event, StepOutput):
            token_ids += event.token_ids
    assert isinstance(event, Report)  # the last one
    return token_ids, event


def generate_greedily(
    model: CausalLM, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[int]:
    """Return the new tokens of transformers' greedy `generate`, without the model's stop_strings.

    An empty `eos_token_ids` disables the end.
    """
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    generate: Any = model.generate  # PreTrainedModel does not declare it
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos_token_ids) or -1,
        stop_strings=None,
        pad_token_id=0,
    )
    new_tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return new_tokens


def decode_past_end(
    runtime: LookaheadRuntime,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    lookahead: LookaheadConfig | None = None,
) -> Generation:
    """Decode a prompt greedily to exactly `max_new_tokens`, past end-of-sequence tokens and stop strings."""
    return runtime.generate(prompt, max_new_tokens, eos=False, stop=[], lookahead=lookahead, sampling=GREEDY)


def totals(generations: Sequence[Generation]) -> tuple[float, float]:
    """Return (S, step tokens) over all generations.

    S is new tokens / steps. Step tokens are tokens fed per step and replica, averaged over all steps except prefills.
    """
    tokens, steps = sum(each.num_tokens for each in generations), sum(each.steps for each in generations)
    fed = sum(each.step_tokens * (each.steps - 1) for each in generations)
    return tokens / steps, fed / (steps - len(generations))


def replica_processes() -> list[psutil.Process]:
    """Return the running replica processes that this process has spawned."""
    replicas = []
    for child in psutil.Process().children():
        try:
            if any(REPLICA_MODULE in word for word in child.cmdline()):  # part of the code after `python -c`
                replicas.append(child)
        except psutil.Error:  # it has just ended
            continue
    return replicas


class Results:
    """Table of results: rows are shown on stderr when added; `finish` prints and writes the table.

    Args:
        name: name of the table, and of its files.
        output: folder that gets NAME.json and NAME.md; None to print only.
        formats: format specifications of floats by column, default .2f. Integers are shown unchanged.
    """

    def __init__(self, name: str, output: Path | None, formats: Mapping[str, str] | None = None):
        self.name = name
        self.rows: list[Row] = []
        self._output = output
        self._formats = formats or {}

    def add(self, row: Mapping[str, Value]) -> None:
        """Add a row and show it on stderr.

        Args:
            row: values by column; the numbers of a sequence are joined by slashes.
        """
        self.rows.append(dict(row))
        print(*(f"{column}={self._shown(column, value)}" for column, value in row.items()), file=sys.stderr, flush=True)

    def finish(self, about: str) -> None:
        """Print the table; if there is an output folder, write it as Markdown and, with raw values, as JSON.

        Args:
            about: text above the table: what applies to all rows.
        """
        environment = describe_environment()
        head = f"{about}; {environment['device']}, {environment['threads']} threads, {environment['versions']}"
        text = f"{head}\n\n{self.table()}\n"
        print(text, flush=True)
        if self._output is not None:
            self._output.mkdir(parents=True, exist_ok=True)
            where = f"Commit {environment['commit']}, {environment['date']}\n\n    {environment['command']}\n"
            (self._output / f"{self.name}.md").write_text(f"{text}\n{where}")
            data = {"study": self.name, "about": about, **environment, "rows": self.rows}
            (self._output / f"{self.name}.json").write_text(json.dumps(data, indent=1) + "\n")

    def table(self) -> str:
        """Return the rows as a Markdown table whose columns are the union of all rows' columns."""
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        shown = [[self._shown(column, row.get(column)) for column in columns] for row in self.rows]
        lines = [columns, ["---"] * len(columns), *shown]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _shown(self, column: str, value: Value) -> str:
        if value is None:
            return ""
        if isinstance(value, str | int):
            return str(value)
        if isinstance(value, float):
            return format(value, self._formats.get(column, ".2f"))
        return " / ".join(self._shown(column, each) for each in value)


def describe_environment() -> dict[str, str | int]:
    """Return the environment of a result: device, threads, versions, commit, date and command line."""
    packages = ["torch", "transformers", *(["ray"] if "ray" in sys.modules else [])]
    versions = [f"Python {platform.python_version()}", *(f"{name} {metadata.version(name)}" for name in packages)]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "versions": ", ".join(versions),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": shlex.join(["python", *sys.argv]),
    }


def _cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} (CPU)" if names else f"{platform.machine()} (CPU)"


def _commit() -> str:
    """Return the commit of the working tree, with `-dirty` if files differ from it; `unknown` outside of git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
