"""What lp-bench found, as a table, JSON and a plot."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Sequence
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


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


class Report:
    """Rows by method; ratios are of the same prompt in the same round, medians over all.

    Args:
        config: of the command.
        runtime: what ran; for its device, type and number of replicas.
        num_prompts: how many there were.
        results: of every method, prompt by prompt, round by round.
    """

    def __init__(
        self, config: BenchConfig, runtime: LookaheadRuntime, num_prompts: int, results: dict[str, list[Result]]
    ):
        info = runtime.info
        device = torch.cuda.get_device_name() if info.device.startswith("cuda") else f"CPU ({platform.machine()})"
        self.head = {
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
            "date": date.today().isoformat(),
        }
        self.rows = []
        first = next(iter(results))
        for name, runs in results.items():
            replicas = 1 if name.startswith("hf") else runtime.num_replicas
            if name.startswith("critical path"):
                replicas = int(name.rpartition(" ")[2])
            for microseconds in runs[0].seconds:
                self.rows.append(self._row(name, replicas, microseconds, runs, results[first], first))

    @staticmethod
    def _row(
        name: str, replicas: int, microseconds: float | None, runs: list[Result], base: list[Result], base_name: str
    ) -> dict:
        rates = [len(run.token_ids) / run.seconds[microseconds] for run in runs]
        base_rates = [len(run.token_ids) / min(run.seconds.values()) for run in base]
        lower, median, upper = quartiles(rates)
        num_steps = sum(run.num_steps for run in runs)
        shares = [run.other_share for run in runs if run.other_share is not None]
        return {
            "method": name,
            "label": LABELS.get(name, "lp_runtime, default, critical path"),
            "replicas": replicas,
            "exchange_us": microseconds,
            "tokens_per_second": median,
            "lower_quartile": lower,
            "upper_quartile": upper,
            f"over_{base_name}": statistics.median(a / b for a, b in zip(rates, base_rates, strict=True)),
            "S": sum(len(run.token_ids) for run in runs) / num_steps,
            "tokens_a_step": None if runs[0].step_tokens is None else statistics.mean(run.step_tokens for run in runs),
            "step_ms": 1000 * sum(run.seconds[microseconds] for run in runs) / num_steps,
            "other_share": statistics.median(shares) if shares else None,
            "other_us": statistics.median(run.other_us for run in runs) if shares else None,
            "outputs_that_differ": sum(a.token_ids != b.token_ids for a, b in zip(runs, base, strict=True)),
        }

    def markdown(self) -> str:
        """The table, and what it was measured on."""
        ratio = next(key for key in self.rows[0] if key.startswith("over_"))
        base = LABELS.get(ratio.removeprefix("over_"), ratio.removeprefix("over_"))
        header = [
            "method",
            "replicas",
            "exchange us",
            "tokens/s (quartiles)",
            f"over {base}",
            "S",
            "tokens a step",
            "step ms",
            "host",
            "outputs that differ",
        ]
        lines = [header, ["---"] * len(header)]
        for row in self.rows:
            rate = f"{row['tokens_per_second']:.1f} ({row['lower_quartile']:.1f} to {row['upper_quartile']:.1f})"
            assumed = "" if row["exchange_us"] is None else f"{row['exchange_us']:g}, assumed"
            host = "" if row["other_share"] is None else f"{100 * row['other_share']:.1f}%, {row['other_us']:.0f} us"
            fed = "" if row["tokens_a_step"] is None else f"{row['tokens_a_step']:.1f}"
            lines.append(
                [
                    row["label"],
                    row["replicas"],
                    assumed,
                    rate,
                    f"{row[ratio]:.2f}",
                    f"{row['S']:.2f}",
                    fed,
                    f"{row['step_ms']:.2f}",
                    host,
                    row["outputs_that_differ"],
                ]
            )
        about = ", ".join(f"{key} {value}" for key, value in self.head.items())
        table = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        return (
            f"{about}\n\n{table}\n\nTimes are of whole requests, prefills included, in an order that turns; medians of"
            " tokens/s, and of ratios of the same prompt. Rows with an assumed exchange are critical paths: each"
            " replica's share of a step was run alone, in turn, and the slowest counts.\n"
        )

    def write(self, folder: Path) -> None:
        """bench.md, bench.json and, where matplotlib is installed, bench.svg."""
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
        figure.savefig(folder / "bench.svg", bbox_inches="tight")
        pyplot.close(figure)
