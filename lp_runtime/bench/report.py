"""The report of lp-bench: a table, JSON and a plot."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from lp_runtime.bench.methods import Result
from lp_runtime.bench.output import markdown_table
from lp_runtime.bench.rows import COLUMNS, TASK_COLUMNS, Row, row_of
from lp_runtime.config.commands import BenchConfig
from lp_runtime.runtime import LookaheadRuntime

LABELS = {
    "hf": "transformers, greedy",
    "hf_compiled": "transformers, static cache, compiled",
    "hf_prompt_lookup": "transformers, prompt lookup",
    "plain": "lp_runtime, one token a step",
    "paper": "lp_runtime, paper drafter (15, 5, 15)",
    "default": "lp_runtime, default",
}
CRITICAL_PATH = "critical path"
NOTE = (
    "Times are of whole requests, prefills included, in an order that rotates; medians of tokens/s, and of ratios of"
    " one prompt. Prefill: to the first token; decode: from there on. Rows with an assumed exchange are critical paths:"
    " each replica's share of a step was run alone, in turn, and the slowest counts."
)
GIT_TIMEOUT_SECONDS = 10.0  # gives up on a repository on a slow disk


def commit() -> str | None:
    """Return the commit of this package's checkout, with "-dirty" if files differ; None without one."""
    package = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=GIT_TIMEOUT_SECONDS
        ).strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != package.parent:  # the package lies inside another repository
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class BenchReport:
    """The report's rows by method, over all prompts and by task.

    `tasks` are those of the prompts. `results` are by method; each list has all prompts of the first round, then those
    of the second, and so on. The first method is the base of all ratios.
    """

    def __init__(
        self, config: BenchConfig, runtime: LookaheadRuntime, tasks: Sequence[str], results: dict[str, list[Result]]
    ):
        info = runtime.info
        device = torch.cuda.get_device_name() if info.device.startswith("cuda") else f"CPU ({platform.machine()})"
        self.head: dict[str, str | int | None] = {
            "model": config.model.location,
            "device": device,
            "dtype": info.dtype,
            "passes": info.not_captured and f"not captured ({info.not_captured})",
            "threads": torch.get_num_threads(),
            "prompts": len(tasks),
            "chat": f"{config.turns} turns" if config.chat else None,
            "rounds": config.rounds,
            "new tokens": config.max_new_tokens,
            "end of text": "respected" if config.stops_at_eos else "ignored",
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
            "python": platform.python_version(),
            "commit": commit(),
            "date": date.today().isoformat(),
        }
        self._base = next(iter(results))
        self._num_replicas = runtime.num_replicas
        self.rows = self._rows(results)
        self.by_task: dict[str, list[Row]] = {}  # empty if there is only one task
        for task in dict.fromkeys(tasks) if len(set(tasks)) > 1 else ():
            places = [place for place in range(len(results[self._base])) if tasks[place % len(tasks)] == task]
            self.by_task[task] = self._rows({name: [each[i] for i in places] for name, each in results.items()})

    def _rows(self, results: dict[str, list[Result]]) -> list[Row]:
        rows = []
        for name, of_method in results.items():
            num_replicas = 1 if name.startswith("hf") else self._num_replicas
            if name.startswith(CRITICAL_PATH):
                num_replicas = int(name.rpartition(" ")[2])
            label = LABELS.get(name, "lp_runtime, default, critical path")
            for exchange_us in of_method[0].seconds:
                rows.append(row_of(name, label, num_replicas, exchange_us, of_method, results[self._base]))
        return rows

    def markdown(self) -> str:
        """Return the tables as Markdown, below a line with the machine and settings."""
        about = ", ".join(f"{key} {value}" for key, value in self.head.items() if value is not None)
        parts = [about, self._table(list(COLUMNS), [[cell(row) for cell in COLUMNS.values()] for row in self.rows])]
        if self.by_task:
            lines = [
                [task, *(cell(row) for cell in TASK_COLUMNS.values())]
                for task, rows in self.by_task.items()
                for row in rows
            ]
            parts.append(self._table(["task", *TASK_COLUMNS], lines))
        return "\n\n".join([*parts, NOTE]) + "\n"

    def _table(self, header: Sequence[str], lines: list[list[str]]) -> str:
        return markdown_table([name.format(base=LABELS.get(self._base, self._base)) for name in header], lines)

    def files(self) -> dict[str, bytes]:
        """Return the content of bench.md, bench.json and, if matplotlib is installed, bench.svg."""
        rows = [row.as_json(self._base) for row in self.rows]
        by_task = {task: [row.as_json(self._base) for row in rows] for task, rows in self.by_task.items()}
        data = {"head": self.head, "rows": rows, "tasks": by_task}
        as_json = json.dumps(data, indent=1, allow_nan=False)
        files = {"bench.md": self.markdown().encode(), "bench.json": as_json.encode()}
        try:
            import matplotlib
        except ImportError:
            with contextlib.suppress(OSError):  # stderr may have been closed by its reader
                print("matplotlib is not installed: no plot", file=sys.stderr)
            return files
        matplotlib.use("svg")
        return files | {"bench.svg": self._plot()}

    def _plot(self) -> bytes:
        """Plot tokens per second of every row, with quartiles, and, if there are several tasks, S by task."""
        from matplotlib import pyplot

        num_plots = 2 if self.by_task else 1
        size = (8 * num_plots, 0.5 * max(len(self.rows), len(self.by_task)) + 1)
        figure, plots = pyplot.subplots(1, num_plots, figsize=size, squeeze=False)
        shown = self.rows[::-1]  # bars are drawn from the bottom up
        rates = [row.tokens_per_second for row in shown]
        lower = [row.tokens_per_second - row.lower_quartile for row in shown]
        upper = [row.upper_quartile - row.tokens_per_second for row in shown]
        plots[0][0].barh([row.full_label() for row in shown], rates, xerr=[lower, upper])
        plots[0][0].set_xlabel("tokens/s")
        if self.by_task:
            for place, row in enumerate(self.rows):
                values = [rows[place].S for rows in self.by_task.values()]
                plots[0][1].plot(values, marker="o", label=row.full_label())
            plots[0][1].set_xticks(range(len(self.by_task)), list(self.by_task), rotation=30, ha="right")
            plots[0][1].set_ylabel("S")
            plots[0][1].legend()
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", bbox_inches="tight")
        pyplot.close(figure)
        return svg.getvalue()
