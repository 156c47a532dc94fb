"""The report of lp-bench: a table, JSON and a plot."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from lp_runtime.bench.methods import Result
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
HEADER = (
    "method",
    "replicas",
    "exchange us",
    "tokens/s (quartiles)",
    "over {base}",
    "S",
    "tokens a step",
    "step ms",
    "host",
    "outputs that differ",
)
NOTE = (
    "Times are of whole requests, prefills included, in an order that rotates; medians of tokens/s, and of ratios of"
    " one prompt. Rows with an assumed exchange are critical paths: each replica's share of a step was run alone, in"
    " turn, and the slowest counts."
)
GIT_TIMEOUT_SECONDS = 10.0  # a repository on a slow disk is no reason to wait longer

Row = dict[str, str | int | float | None]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of one or more values."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with "-dirty" if files differ; None elsewhere."""
    package = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_TIMEOUT_SECONDS,
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != package.parent:  # a checkout of something else, with this in it
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class BenchReport:
    """Rows by method. Ratios are of one prompt in one round; medians over all.

    Args:
        config: settings of the command.
        runtime: what ran; gives device, type and number of replicas.
        num_prompts: number of prompts.
        results: results by method, prompt by prompt, round by round.

    Attributes:
        head: device, versions, commit, date and settings.
        rows: one for each method and assumed exchange.
    """

    def __init__(
        self, config: BenchConfig, runtime: LookaheadRuntime, num_prompts: int, results: dict[str, list[Result]]
    ):
        info = runtime.info
        device = torch.cuda.get_device_name() if info.device.startswith("cuda") else f"CPU ({platform.machine()})"
        self.head: dict[str, str | int | None] = {
            "model": config.model.location,
            "device": device,
            "dtype": info.dtype,
            "threads": torch.get_num_threads(),
            "prompts": num_prompts,
            "rounds": config.rounds,
            "new tokens": config.max_new_tokens,
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
            "python": platform.python_version(),
            "commit": commit(),
            "date": date.today().isoformat(),
        }
        self.rows: list[Row] = []
        base = next(iter(results))
        for name, of_method in results.items():
            num_replicas = 1 if name.startswith("hf") else runtime.num_replicas
            if name.startswith(CRITICAL_PATH):
                num_replicas = int(name.rpartition(" ")[2])
            for exchange_us in of_method[0].seconds:
                row = {
                    "method": name,
                    "label": LABELS.get(name, "lp_runtime, default, critical path"),
                    "replicas": num_replicas,
                    "exchange_us": exchange_us,
                    **_speeds(of_method, exchange_us, results[base], f"over_{base}"),
                    **_steps(of_method, exchange_us),
                }
                pairs = zip(of_method, results[base], strict=True)
                row["outputs_that_differ"] = sum(one.token_ids != other.token_ids for one, other in pairs)
                self.rows.append(row)

    def markdown(self) -> str:
        """Return the table, with what it was measured on above it."""
        ratio = next(key for key in self.rows[0] if key.startswith("over_"))
        base = LABELS.get(ratio.removeprefix("over_"), ratio.removeprefix("over_"))
        header = [name.format(base=base) for name in HEADER]
        lines = [header, ["---"] * len(header), *(_cells(row, ratio) for row in self.rows)]
        about = ", ".join(f"{key} {value}" for key, value in self.head.items() if value is not None)
        table = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        return f"{about}\n\n{table}\n\n{NOTE}\n"

    def write(self, folder: Path) -> None:
        """Write bench.md, bench.json and, where matplotlib is installed, bench.svg.

        Raises:
            OSError: a file cannot be written.
        """
        (folder / "bench.md").write_text(self.markdown(), encoding="utf-8")
        (folder / "bench.json").write_text(
            json.dumps({"head": self.head, "rows": self.rows}, indent=1, allow_nan=False)
        )
        try:
            import matplotlib
        except ImportError:
            print("matplotlib is not installed: no plot", file=sys.stderr)
            return
        matplotlib.use("svg")
        self._plot(folder / "bench.svg")

    def _plot(self, path: Path) -> None:
        """Draw tokens per second of every row, with quartiles."""
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(self.rows) + 1))
        labels = [
            row["label"]
            + (f" x {row['replicas']}" if row["replicas"] > 1 else "")
            + ("" if row["exchange_us"] is None else f", {row['exchange_us']:g} us")
            for row in self.rows
        ]
        rates = [row["tokens_per_second"] for row in self.rows]
        spread = [
            [rate - row["lower_quartile"] for rate, row in zip(rates, self.rows, strict=True)],
            [row["upper_quartile"] - rate for rate, row in zip(rates, self.rows, strict=True)],
        ]
        axes.barh(labels[::-1], rates[::-1], xerr=[side[::-1] for side in spread])
        axes.set_xlabel("tokens/s")
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)


def _speeds(of_method: list[Result], exchange_us: float | None, of_base: list[Result], ratio: str) -> Row:
    """Return tokens per second, and, by the key `ratio`, how many times those of the first method they are."""
    rates = [len(result.token_ids) / result.seconds[exchange_us] for result in of_method]
    base_rates = [len(result.token_ids) / min(result.seconds.values()) for result in of_base]
    lower, median, upper = quartiles(rates)
    return {
        "tokens_per_second": median,
        "lower_quartile": lower,
        "upper_quartile": upper,
        ratio: statistics.median(rate / base_rate for rate, base_rate in zip(rates, base_rates, strict=True)),
    }


def _steps(of_method: list[Result], exchange_us: float | None) -> Row:
    """Return the compression ratio, and tokens and time of a step."""
    num_steps = sum(result.num_steps for result in of_method)

    def known(figures: Iterable[float | None], summarize: Callable[[list[float]], float]) -> float | None:
        values = [value for value in figures if value is not None]
        return summarize(values) if values else None

    return {
        "S": sum(len(result.token_ids) for result in of_method) / num_steps,
        "tokens_a_step": known((result.step_tokens for result in of_method), statistics.mean),
        "step_ms": 1000 * sum(result.seconds[exchange_us] for result in of_method) / num_steps,
        "other_share": known((result.other_share for result in of_method), statistics.median),
        "other_us": known((result.other_us for result in of_method), statistics.median),
    }


def _cells(row: Row, ratio: str) -> list[str | int]:
    """Return a row as the table shows it; `ratio` is the key of the speed over the first method's."""
    rate = f"{row['tokens_per_second']:.1f} ({row['lower_quartile']:.1f} to {row['upper_quartile']:.1f})"
    return [
        row["label"],
        row["replicas"],
        "" if row["exchange_us"] is None else f"{row['exchange_us']:g}, assumed",
        rate,
        f"{row[ratio]:.2f}",
        f"{row['S']:.2f}",
        "" if row["tokens_a_step"] is None else f"{row['tokens_a_step']:.1f}",
        f"{row['step_ms']:.2f}",
        "" if row["other_share"] is None else f"{100 * row['other_share']:.1f}%, {row['other_us']:.0f} us",
        row["outputs_that_differ"],
    ]
