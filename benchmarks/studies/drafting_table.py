"""Table and plot of a drafting study, its columns, and settings that several studies compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Results, Value

from lp_runtime.config.lookahead import LookaheadConfig
from studies.drafting_bench import GREEDY, Bench, Drafting, Run

PLOTTED = ("drafters", "degrees", "chains")
PROMPT_LOOKUP = LookaheadConfig(drafter="prompt_lookup")
RECYCLING = LookaheadConfig(drafter="recycling")


def full(tokens: int, **settings: Any) -> LookaheadConfig:
    """Return settings of the drafter `full`; each replica feeds `tokens` in every step."""
    return LookaheadConfig(tokens=tokens, **settings)


def paper(W: int, N: int, G: int, **settings: Any) -> LookaheadConfig:
    """Return settings of the drafter `paper`; `settings` are other fields of LookaheadConfig."""
    return LookaheadConfig(W=W, N=N, G=G, drafter="paper", **settings)


def compression_ratio(runs: Sequence[Run]) -> float:
    """Return S over all runs."""
    return sum(len(run.tokens) for run in runs) / sum(run.num_steps for run in runs)


def step_tokens(runs: Sequence[Run]) -> float:
    """Return the busiest replica's tokens per step, averaged over the steps of all runs except prefills."""
    return sum(run.num_fed for run in runs) / max(1, sum(run.num_steps - 1 for run in runs))


def least_repetitive(runs: Sequence[Run]) -> list[Run]:
    """Return the third of the runs whose outputs repeat the fewest 4-grams."""
    return sorted(runs, key=lambda run: run.repeated)[: max(1, len(runs) // 3)]


class Study:
    """Rows of one study.

    Args:
        name: name of the study, and of its files.
        bench: decodes the prompts.
        output: folder for the files; None to print only.
        also: files that the study has written for other models.
    """

    def __init__(self, name: str, bench: Bench, output: Path | None, also: Sequence[Path] = ()):
        self.bench, self.output, self.also = bench, output, also
        self._results = Results(
            name, output, {"propose ms": ".3f", "advance ms": ".3f"} | dict.fromkeys(_RATIOS, ".3f")
        )
        self._points: dict[str, list[tuple[float, float]]] = {}

    def add(
        self,
        label: str,
        drafting: Drafting,
        degree: int = 1,
        sampling: Mapping[str, Any] = GREEDY,
        line: str | None = None,
        x: float | None = None,
        as_chains: bool = False,
    ) -> list[Run]:
        """Decode all prompts, and add a row; several kinds of prompts have a column of S each.

        Args:
            label: label of the row.
            drafting: settings or factory of the drafter.
            degree: number of replicas.
            sampling: settings of SamplingConfig.
            line: line of the plot to which the row adds a point; `label` by default.
            x: x coordinate of the point; the step tokens by default.
            as_chains: see `Bench.decode_all`.
        """
        runs = self.bench.decode_all(drafting, degree, sampling, as_chains)
        row = self.row(label, runs, degree, sampling)
        self.add_row(row)
        self._points.setdefault(line or label, []).append((x or step_tokens(runs), compression_ratio(runs)))
        return runs

    def row(
        self, label: str, runs: Sequence[Run], degree: int = 1, sampling: Mapping[str, Any] = GREEDY
    ) -> dict[str, Value]:
        """Return the columns that most studies share, from the runs of all prompts; see `add` for the rest."""
        shown = (
            ", ".join(f"{name} {value:g}" for name, value in sampling.items()) if sampling["temperature"] else "greedy"
        )
        row: dict[str, Value] = {"drafter": label, "replicas": degree, "sampling": shown}
        row |= {"step tokens": step_tokens(runs), "S": compression_ratio(runs)}
        row |= {"S, least repetitive": compression_ratio(least_repetitive(runs))}
        row |= {"4-grams repeated": statistics.mean(run.repeated for run in runs)}
        kinds = [kind for kind, _ in self.bench.prompts]
        for kind in dict.fromkeys(kinds) if len(set(kinds)) > 1 else ():
            row[kind] = compression_ratio([run for run, of in zip(runs, kinds, strict=True) if of == kind])
        return row

    def add_row(self, row: Mapping[str, Value]) -> None:
        """Add a row of any columns."""
        self._results.add(row)

    def write(self, name: str, text: str) -> None:
        """Write a file of the study if there is an output folder."""
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)
            (self.output / name).write_text(text)

    def finish(self, about: str) -> None:
        """Print and write the table, and the plot if the study has one and matplotlib is installed."""
        self._results.finish(about)
        if self.output is not None and self._results.name in PLOTTED:
            label = "tokens a step, all replicas" if self._results.name != "drafters" else "tokens fed a step"
            plot(self._points, label, self.output / f"{self._results.name}.svg")


_RATIOS = ("S", "S, least repetitive", "4-grams repeated")


def plot(lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, path: Path) -> None:
    """Plot S against tokens, one line per label; do nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(x_label)
    axes.set_ylabel("S")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
