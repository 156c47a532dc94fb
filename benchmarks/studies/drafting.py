"""The drafting studies: which drafters and settings each compares, and the table and plot of one study."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common import Results, Value
from support.goose import GooseDrafter
from support.peers import SamDrafter
from support.racer import RacerDrafter

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.lookahead.drafters.base import Drafter
from lp_runtime.lookahead.drafters.token_recycling import TokenRecyclingDrafter
from studies.drafting_bench import GREEDY, Bench, Drafting, Run
from studies.starting_rates import fit_calibration, fit_rates, promised_and_accepted, source_of, starting_rates_of

BUDGETS = (16, 32, 46, 54, 83, 160, 320, 640)
DEGREES = (1, 2, 4, 8, 16)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # columns of the study `sources`
PLOTTED = ("drafters", "degrees", "chains")
PROMPT_LOOKUP = LookaheadConfig(drafter="prompt_lookup")
RECYCLING = LookaheadConfig(drafter="recycling")
SAM = "SAM decoding with a recycling tree"


def full(budget: int, degree: int = 1, **settings: str) -> LookaheadConfig:
    """Return settings of the drafter `full` that spends its budget in every step.

    Args:
        budget: tokens that a replica feeds in a step.
        degree: number of replicas.
        settings: further settings of LookaheadConfig.
    """
    return LookaheadConfig(W=(budget * degree) // 4 + 1, N=5, G=0, budget=budget, **settings)


def paper(W: int, N: int, G: int, **settings: str | bool) -> LookaheadConfig:
    """Return settings of the drafter `paper`; `settings` are further ones of LookaheadConfig."""
    return LookaheadConfig(W=W, N=N, G=G, drafter="paper", **settings)


def compression_ratio(runs: Sequence[Run]) -> float:
    """Return S over all runs."""
    return sum(len(run.tokens) for run in runs) / sum(run.num_steps for run in runs)


def step_tokens(runs: Sequence[Run]) -> float:
    """Return the tokens that the busiest replica feeds a step, the mean over all runs' steps without the prefills'."""
    return sum(run.num_fed for run in runs) / max(1, sum(run.num_steps - 1 for run in runs))


def least_repetitive(runs: Sequence[Run]) -> list[Run]:
    """Return the third of the runs whose outputs repeat the fewest 4-grams."""
    return sorted(runs, key=lambda run: run.repeated)[: max(1, len(runs) // 3)]


class Study:
    """One study's rows.

    Args:
        name: of the study and its files.
        bench: decodes.
        output: folder for the files; None to print only.
    """

    def __init__(self, name: str, bench: Bench, output: Path | None):
        self.bench = bench
        self._results = Results(
            name, output, {"propose ms": ".3f", "advance ms": ".3f"} | dict.fromkeys(_RATIOS, ".3f")
        )
        self._output = output
        self._points: dict[str, list[tuple[float, float]]] = {}

    def add(
        self,
        label: str,
        drafting: Drafting,
        degree: int = 1,
        sampling: Mapping[str, float] = GREEDY,
        line: str | None = None,
        x: float | None = None,
        as_chains: bool = False,
    ) -> list[Run]:
        """Decode all prompts, and add a row.

        Args:
            label: of the row.
            drafting: what drafts.
            degree: number of replicas.
            sampling: settings of SamplingConfig.
            line: of the plot that the row is a point of; `label` by default.
            x: where the point stands; at the step tokens by default.
            as_chains: see `Bench.decode_all`.
        """
        runs = self.bench.decode_all(drafting, degree, sampling, as_chains)
        row = self.row(label, runs, degree, sampling)
        self.add_row(row)
        self._points.setdefault(line or label, []).append((x or step_tokens(runs), compression_ratio(runs)))
        return runs

    @staticmethod
    def row(
        label: str, runs: Sequence[Run], degree: int = 1, sampling: Mapping[str, float] = GREEDY
    ) -> dict[str, Value]:
        """Return the columns that most studies have; arguments as in `add`, and the prompts' runs."""
        shown = (
            ", ".join(f"{name} {value:g}" for name, value in sampling.items()) if sampling["temperature"] else "greedy"
        )
        row: dict[str, Value] = {"drafter": label, "replicas": degree, "sampling": shown}
        row |= {"step tokens": step_tokens(runs), "S": compression_ratio(runs)}
        row |= {"S, least repetitive": compression_ratio(least_repetitive(runs))}
        return row | {"4-grams repeated": statistics.mean(run.repeated for run in runs)}

    def add_row(self, row: Mapping[str, Value]) -> None:
        """Add a row of any columns."""
        self._results.add(row)

    def write(self, name: str, text: str) -> None:
        """Write a file of the study's where there is a folder."""
        if self._output is not None:
            self._output.mkdir(parents=True, exist_ok=True)
            (self._output / name).write_text(text)

    def finish(self, about: str) -> None:
        """Print and write the table, and the plot where the study has one and matplotlib is installed."""
        self._results.finish(about)
        if self._output is not None and self._results.name in PLOTTED:
            label = "tokens a step, all replicas" if self._results.name != "drafters" else "tokens fed a step"
            plot(self._points, label, self._output / f"{self._results.name}.svg")


_RATIOS = ("S", "S, least repetitive", "4-grams repeated")


def plot(lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, path: Path) -> None:
    """Plot S against tokens, a line a label; without matplotlib do nothing."""
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


def drafters(study: Study) -> None:
    """S of every drafter, by tokens a step."""
    for W, N, G in ((5, 3, 5), (7, 5, 7), (15, 5, 15)):
        study.add(f"paper ({W}, {N}, {G})", paper(W, N, G), line="paper")
        guesses = paper(W, N, G, acceptance="guesses")
        study.add(f"paper ({W}, {N}, {G}), guesses alone", guesses, line="paper, guesses alone")
    study.add("prompt lookup", PROMPT_LOOKUP)
    study.add("token recycling", RECYCLING)
    study.add(SAM, SamDrafter, line="SAM decoding")
    for budget in BUDGETS:
        study.add(f"full, {budget}", full(budget), line="full")
        study.add(f"full, {budget}, prior=none", full(budget, prior="none"), line="full, prior=none")


def headline(study: Study) -> None:
    """The baselines and what is compared with each; with and without --eos."""
    study.add("paper (15, 5, 15)", paper(15, 5, 15))
    study.add("prompt lookup", PROMPT_LOOKUP)
    study.add("token recycling", RECYCLING)
    study.add(SAM, SamDrafter)
    study.add("full, 54", full(54))
    study.add("full, 83", full(83))


def degrees(study: Study) -> None:
    """S by number of replicas."""
    for budget in (16, 83):
        for degree in DEGREES:
            line = f"full, {budget} a replica"
            study.add(f"full, {budget}", full(budget, degree), degree, line=line, x=degree * budget)
    for degree in DEGREES:  # the paper's weak scaling: window and guesses grow with the replicas
        W = 15 * degree
        line = "paper, W = G = 15 a replica"
        study.add(f"paper ({W}, 5, {W})", paper(W, 5, W), degree, line=line, x=degree * 120)


def chains(study: Study) -> None:
    """S by number of replicas of which each follows one path of the tree, beside whole trees of as many tokens."""
    for as_chains in (True, False):
        for budget in (8, 16):
            for degree in DEGREES:
                kind = "one path a replica" if as_chains else "trees"
                study.add(f"{kind}, {budget}", full(budget, degree), degree, x=degree * budget, as_chains=as_chains)


def ablation(study: Study) -> None:
    """The paper's table 3, and what each source is worth."""
    study.add("paper: window and pool, from the prompt, too", paper(15, 5, 15))
    study.add("paper: no prompt in the pool", paper(15, 5, 15, pool_from_prompt=False))
    study.add("paper: no window", paper(0, 5, 15))
    study.add("paper: a small window", paper(5, 5, 15))
    study.add("paper: no guesses", paper(15, 5, 0))
    study.add("paper: Jacobi decoding", paper(15, 2, 0))
    study.add("full", full(83))
    study.add("full, prior=none", full(83, prior="none"))


def sampling(study: Study) -> None:
    """S of sampled decoding beside greedy decoding."""
    for settings in (GREEDY, {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}):
        study.add("paper (15, 5, 15)", paper(15, 5, 15), sampling=settings)
        study.add("token recycling", RECYCLING, sampling=settings)
        for W, N, G in ((7, 5, 7), (15, 5, 15)):
            study.add(f"full ({W}, {N}, {G})", LookaheadConfig(W, N, G), sampling=settings)
        for budget in (16, 54, 83):
            study.add(f"full, {budget}", full(budget), sampling=settings)
        study.add("full, 83, prior=none", full(83, prior="none"), sampling=settings)


def draft_tables(study: Study) -> None:
    """Draft tables of one request beside draft tables that outlive requests."""
    for budget in (16, 83):
        study.add(f"full, {budget}, draft_tables=request", full(budget))
        study.add(f"full, {budget}, draft_tables=runtime", full(budget, draft_tables="runtime"))


def categories(study: Study) -> None:
    """S by kind of prompt."""
    methods = (
        ("paper (15, 5, 15)", paper(15, 5, 15)),
        ("prompt lookup", PROMPT_LOOKUP),
        ("token recycling", RECYCLING),
        ("full, 54", full(54)),
        ("full, 83", full(83)),
    )
    add_by_kind(study, methods, GREEDY)


def kept(drafter: Drafter) -> Callable[[], Drafter]:
    """Return a drafting of one drafter for all prompts, whose tables are never reset."""
    return lambda: drafter


def reset_peers(budget: int) -> list[tuple[str, Drafting]]:
    """Return the methods that are compared at a budget, their tables reset for each prompt."""
    at = {
        16: [("prompt lookup", PROMPT_LOOKUP), ("RACER, 16", lambda: RacerDrafter(16))],
        64: [
            ("RACER, 64", lambda: RacerDrafter(64)),
            ("Goose, 64", lambda: GooseDrafter(64)),
            ("token recycling, 64", LookaheadConfig(drafter="recycling", budget=64)),
            (SAM, SamDrafter),
        ],
        83: [("paper (15, 5, 15)", paper(15, 5, 15))],
    }
    return [(f"full, {budget}", full(budget)), *at[budget]]


def kept_peers() -> list[tuple[str, Drafting]]:
    """Return the methods whose tables can outlive prompts, at 64 nodes, with tables that do."""
    return [
        ("full, 64, kept", full(64, draft_tables="runtime")),
        ("RACER, 64, kept", kept(RacerDrafter(64))),
        ("Goose, 64, kept", kept(GooseDrafter(64))),
        ("token recycling, 64, kept", kept(TokenRecyclingDrafter(64))),
    ]


def add_by_kind(study: Study, methods: Sequence[tuple[str, Drafting]], sampling: Mapping[str, float]) -> None:
    """Decode all prompts by some methods, and add a row a method, with S by kind of prompt."""
    kinds = [kind for kind, _ in study.bench.prompts]
    for label, drafting in methods:
        runs = study.bench.decode_all(drafting, sampling=sampling)
        row = study.row(label, runs, sampling=sampling) | {"outputs equal": f"{len(runs)} of {len(runs)}"}
        for kind in dict.fromkeys(kinds):
            row[kind] = compression_ratio([run for run, of in zip(runs, kinds, strict=True) if of == kind])
        study.add_row(row)


def peers(study: Study) -> None:
    """S beside the published draft-free methods at 64, 16 and 83 nodes, by kind of prompt, greedy; tables reset."""
    for budget in (64, 16, 83):
        add_by_kind(study, reset_peers(budget), GREEDY)


def peers_sampled(study: Study) -> None:
    """As `peers`, at temperature 1.0 and 0.7."""
    for temperature in (1.0, 0.7):
        for budget in (83, 64, 16):
            add_by_kind(study, reset_peers(budget), {"temperature": temperature})


def peers_kept(study: Study) -> None:
    """As `peers` at 64 nodes, greedy, with tables that are kept from prompt to prompt."""
    add_by_kind(study, kept_peers(), GREEDY)


def sources(study: Study) -> None:
    """Accepted / fed by source and depth."""
    for label, settings in (("full, 83", GREEDY), ("full, 83, temperature 1", {"temperature": 1.0})):
        runs = study.bench.decode_all(full(83), sampling=settings)
        fed = sum(run.drafter.counts.fed for run in runs)
        accepted = sum(run.drafter.counts.accepted for run in runs)
        for name, took, had in zip(runs[0].drafter.counts.sources, accepted, fed, strict=True):
            row: dict[str, Value] = {"source": f"{label}: {name}", "all": f"{took.sum()}/{had.sum()}"}
            row |= {f"depth {depth}": f"{took[depth - 1]}/{had[depth - 1]}" for depth in DEPTHS}
            study.add_row(row)


def starting_rates(study: Study) -> None:
    """Promised against accepted by level of the estimate; the rates that estimates should start from go to OUTPUT."""
    fitted = {}
    for name, ways in (("GREEDY", [GREEDY]), ("SAMPLED", [{"temperature": 1.0}, {"temperature": 0.7}])):
        counted = [run.counted for way in ways for run in study.bench.decode_all(full(64), sampling=way)]
        requests = [each for each in counted if each is not None]
        for level, (promised, accepted) in enumerate(promised_and_accepted(requests)):
            study.add_row({"decoding": name, "level": level, "promised": promised, "accepted": accepted})
        fitted[name] = starting_rates_of(fit_rates([requests]), fit_calibration([requests]))
    study.write("starting_rates.py", source_of(fitted, "the prompts and the model of the command"))


def host(study: Study) -> None:
    """Milliseconds a step of proposing and advancing on the host; nothing else must run on the machine."""
    for settings in (GREEDY, {"temperature": 1.0}):
        for budget in (16, 128, 1024):
            runs = study.bench.decode_all(full(budget), sampling=settings)
            num_steps = sum(run.num_steps - 1 for run in runs)
            row = study.row(f"full, {budget}", runs, sampling=settings)
            row["propose ms"] = 1000 * sum(run.propose_seconds for run in runs) / num_steps
            row["advance ms"] = 1000 * sum(run.advance_seconds for run in runs) / num_steps
            study.add_row(row)


STUDIES = (
    drafters,
    headline,
    degrees,
    chains,
    ablation,
    sampling,
    draft_tables,
    categories,
    peers,
    peers_sampled,
    peers_kept,
    sources,
    starting_rates,
    host,
)
