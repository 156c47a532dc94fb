"""The report of lp-bench: a table, JSON and a plot."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of a row.

    Attributes:
        tokens_per_second: median over requests.
        lower_quartile: of tokens per second over requests.
        upper_quartile: of tokens per second over requests.
        over_base: median, over requests, of the ratio to the first method's tokens per second.
    """

    tokens_per_second: float
    lower_quartile: float
    upper_quartile: float
    over_base: float

    @classmethod
    def of(cls, of_method: list[Result], exchange_us: float | None, of_base: list[Result]) -> Speeds:
        """Return the speeds of a method's results at an assumed exchange, beside the first method's results."""
        rates = [len(result.token_ids) / result.seconds[exchange_us] for result in of_method]
        base_rates = [len(result.token_ids) / min(result.seconds.values()) for result in of_base]
        lower, median, upper = quartiles(rates)
        over_base = statistics.median(rate / base_rate for rate, base_rate in zip(rates, base_rates, strict=True))
        return cls(median, lower, upper, over_base)


@dataclass(frozen=True)
class Steps:
    """Steps of a row, over all its requests.

    Attributes:
        S: compression ratio: new tokens / steps.
        tokens_a_step: mean of the tokens fed in a step; None where it is not known.
        step_ms: milliseconds a step, the prefill included.
        other_share: median of Result.other_share; None where it is not known.
        other_us: median of Result.other_us; None where it is not known.
    """

    S: float
    tokens_a_step: float | None
    step_ms: float
    other_share: float | None
    other_us: float | None

    @classmethod
    def of(cls, of_method: list[Result], exchange_us: float | None) -> Steps:
        """Return the compression ratio, and tokens and time of a step, of a method's results at an assumed exchange."""
        num_steps = sum(result.num_steps for result in of_method)

        def known(figures: Iterable[float | None], summarize: Callable[[list[float]], float]) -> float | None:
            values = [value for value in figures if value is not None]
            return summarize(values) if values else None

        return cls(
            S=sum(len(result.token_ids) for result in of_method) / num_steps,
            tokens_a_step=known((result.step_tokens for result in of_method), statistics.mean),
            step_ms=1000 * sum(result.seconds[exchange_us] for result in of_method) / num_steps,
            other_share=known((result.other_share for result in of_method), statistics.median),
            other_us=known((result.other_us for result in of_method), statistics.median),
        )


@dataclass(frozen=True)
class Row:
    """One method at one assumed exchange.

    Attributes:
        method: the method's name.
        label: the method's name in the table and the plot.
        replicas: number of replicas.
        exchange_us: assumed microseconds of a step's exchange; None where none is assumed.
        speeds: tokens per second.
        steps: compression ratio, and tokens and time of a step.
        outputs_that_differ: number of requests whose tokens are not the first method's.
    """

    method: str
    label: str
    replicas: int
    exchange_us: float | None
    speeds: Speeds
    steps: Steps
    outputs_that_differ: int

    def as_json(self, base: str) -> dict[str, str | int | float | None]:
        """Return the row as bench.json has it: flat, with the speed over the first method's by the key `over_BASE`."""
        speeds = asdict(self.speeds)
        speeds[f"over_{base}"] = speeds.pop("over_base")
        return {
            "method": self.method,
            "label": self.label,
            "replicas": self.replicas,
            "exchange_us": self.exchange_us,
            **speeds,
            **asdict(self.steps),
            "outputs_that_differ": self.outputs_that_differ,
        }


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
        self._base = next(iter(results))
        of_base = results[self._base]
        for name, of_method in results.items():
            num_replicas = 1 if name.startswith("hf") else runtime.num_replicas
            if name.startswith(CRITICAL_PATH):
                num_replicas = int(name.rpartition(" ")[2])
            for exchange_us in of_method[0].seconds:
                pairs = zip(of_method, of_base, strict=True)
                row = Row(
                    method=name,
                    label=LABELS.get(name, "lp_runtime, default, critical path"),
                    replicas=num_replicas,
                    exchange_us=exchange_us,
                    speeds=Speeds.of(of_method, exchange_us, of_base),
                    steps=Steps.of(of_method, exchange_us),
                    outputs_that_differ=sum(one.token_ids != other.token_ids for one, other in pairs),
                )
                self.rows.append(row)

    def markdown(self) -> str:
        """Return the table, with what it was measured on above it."""
        header = [name.format(base=LABELS.get(self._base, self._base)) for name in HEADER]
        lines = [header, ["---"] * len(header), *(_cells(row) for row in self.rows)]
        about = ", ".join(f"{key} {value}" for key, value in self.head.items() if value is not None)
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{about}\n\n{table}\n\n{NOTE}\n"

    def write(self, folder: Path) -> None:
        """Write bench.md, bench.json and, where matplotlib is installed, bench.svg.

        Raises:
            OSError: a file cannot be written.
        """
        (folder / "bench.md").write_text(self.markdown(), encoding="utf-8")
        rows = [row.as_json(self._base) for row in self.rows]
        (folder / "bench.json").write_text(json.dumps({"head": self.head, "rows": rows}, indent=1, allow_nan=False))
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
            row.label
            + (f" x {row.replicas}" if row.replicas > 1 else "")
            + ("" if row.exchange_us is None else f", {row.exchange_us:g} us")
            for row in self.rows
        ]
        rates = [row.speeds.tokens_per_second for row in self.rows]
        spread = [
            [rate - row.speeds.lower_quartile for rate, row in zip(rates, self.rows, strict=True)],
            [row.speeds.upper_quartile - rate for rate, row in zip(rates, self.rows, strict=True)],
        ]
        axes.barh(labels[::-1], rates[::-1], xerr=[side[::-1] for side in spread])
        axes.set_xlabel("tokens/s")
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)


def _cells(row: Row) -> list[str]:
    """Return a row as the table shows it."""
    speeds, steps = row.speeds, row.steps
    return [
        row.label,
        str(row.replicas),
        "" if row.exchange_us is None else f"{row.exchange_us:g}, assumed",
        f"{speeds.tokens_per_second:.1f} ({speeds.lower_quartile:.1f} to {speeds.upper_quartile:.1f})",
        f"{speeds.over_base:.2f}",
        f"{steps.S:.2f}",
        "" if steps.tokens_a_step is None else f"{steps.tokens_a_step:.1f}",
        f"{steps.step_ms:.2f}",
        "" if steps.other_share is None else f"{100 * steps.other_share:.1f}%, {steps.other_us:.0f} us",
        str(row.outputs_that_differ),
    ]
