"""How many steps drafting saves: S by drafter, tokens a step and LP degree; ablation; categories; sources.

    python benchmarks/drafting.py drafters --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --output out/
    python benchmarks/drafting.py headline degrees ablation sampling draft_tables sources host ...
    python benchmarks/drafting.py categories --prompts spec_bench.jsonl:turns --limit 480 --each 4 ...

S = new tokens / steps over all prompts, the prefill's step included, past end-of-text to exactly --max-new-tokens
(unless --eos). Each output is compared with one token a step. "tokens a step" is the mean over steps of what the
busiest replica feeds. "least repetitive" is S over the third of the prompts whose outputs repeat the fewest 4-grams.

With several replicas a step is computed as one forward pass of the whole tree on this one: the tree, the partition and
so the number of steps are what so many replicas have. Nothing is timed but by the study `host`. Results go to
OUTPUT/STUDY.md and .json, and, where matplotlib is installed, to OUTPUT/STUDY.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import machine, markdown
from support.peers import SamDrafter

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.engine.calibration import Calibration
from lp_runtime.engine.drafter_factory import make_drafter
from lp_runtime.engine.request import Request
from lp_runtime.engine.sampler_factory import make_sampler
from lp_runtime.lookahead.drafters.base import Drafter, VerificationResult
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables
from lp_runtime.lookahead.state import DecodingRules, DecodingState
from lp_runtime.model.loader import eos_token_ids, load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import assumed_times

BUDGETS = (16, 32, 46, 54, 83, 160, 320, 640)
DEGREES = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")


def full(budget: int, degree: int = 1, **settings) -> LookaheadConfig:
    """The drafter `full` that spends its budget in every step."""
    return LookaheadConfig(W=(budget * degree) // 4 + 1, N=5, G=0, budget=budget, **settings)


def paper(W: int, N: int, G: int, **settings) -> LookaheadConfig:
    return LookaheadConfig(W=W, N=N, G=G, drafter="paper", **settings)


@dataclass
class Run:
    """One prompt's output and what it took."""

    tokens: list[int]
    steps: int
    fed: int  # by the busiest replica, the prefill excluded
    drafter: Drafter
    proposing: float  # seconds, over all steps
    advancing: float

    @property
    def repeated(self) -> float:
        """Share of the output's 4-grams that occurred in it before."""
        grams = [tuple(self.tokens[i : i + 4]) for i in range(len(self.tokens) - 3)]
        return 1 - len(set(grams)) / max(1, len(grams))


class Bench:
    """A model and prompts; decodes them with any drafter and checks every output."""

    def __init__(self, args: argparse.Namespace):
        config = ModelConfig(path=args.model)
        self.model = ModelRunner(load_model(config, CPU, "float32"), config.prefill_chunk)
        self.calibration = Calibration(self.model, 0, 1, CPU, None)
        self.draft_tables = DraftTables(LookaheadConfig.draft_tables_bytes)
        self.max_new_tokens = args.max_new_tokens
        self.eos = eos_token_ids(self.model.model) if args.eos else frozenset()
        self.prompts: list[tuple[str, list[int]]] = []
        tokenizer = load_tokenizer(config)
        for source in args.prompts:
            path, _, field = source.rpartition(":")
            for line in Path(path).read_text().splitlines()[: args.limit]:
                row = json.loads(line)
                text = row[field][0] if isinstance(row[field], list) else row[field]
                kind = row.get("category", Path(path).stem)
                if sum(of == kind for of, _ in self.prompts) >= args.each:
                    continue
                self.prompts.append((kind, tokenizer(text, add_special_tokens=False)["input_ids"]))
        self._expected: dict[tuple, list[int]] = {}

    def decode(
        self, index: int, settings: LookaheadConfig | Callable[[], Drafter], degree: int = 1, temperature: float = 0.0
    ) -> Run:
        """Decode a prompt; the sample's seed is its index."""
        _, prompt = self.prompts[index]
        sampling = SamplingConfig(temperature=temperature, seed=index if temperature else None)
        request = Request(tuple(prompt), LookaheadConfig(), self.max_new_tokens, self.eos, sampling)
        drawing = make_sampler(self.model, request)
        if isinstance(settings, LookaheadConfig):
            if settings.draft_tables == "request":
                self.draft_tables.clear()
            noise = None if drawing.noise is None else (drawing.noise.seed, drawing.noise.sample)
            limit = degree * (settings.budget or 1 << 12)
            drafter = make_drafter(settings, noise, limit, lambda: self.draft_tables, self.calibration.vocabulary)
            cap = settings.budget
        else:
            drafter, cap = settings(), None
        drawing.num_top_k = drafter.num_top_k
        state = DecodingState(prompt, DecodingRules(self.max_new_tokens, self.eos), drafter)
        num_nodes = drafter.max_nodes + drafter.max_committed
        budget = StepBudget(assumed_times(degree, num_nodes), False, cap)
        self.model.begin(len(prompt) + self.max_new_tokens + num_nodes)
        proposal = state.propose_prefill()
        logits = self.model.prefill(prompt)
        found = self._found(drawing, drawing.draw(logits, proposal.tree, [0], state.tokens)[0], 0)
        if isinstance(drafter, SamDrafter):
            self._show_prompt(drafter, drawing, prompt)
        state.advance_prefill(proposal, found)
        fed, proposing, advancing = 0, 0.0, 0.0
        while state.finish_reason is None:
            started = time.perf_counter()
            proposal = state.propose(budget.fit)
            proposing += time.perf_counter() - started
            tree = proposal.tree
            fed += max(budget.shares(tree).sizes)
            wanted = list(range(tree.root, len(tree)))
            logits = self.model.forward(tree, list(range(len(tree))), wanted)
            packed, _ = drawing.draw(logits, tree, wanted, state.tokens)
            found = self._found(drawing, packed, tree.root)
            started = time.perf_counter()
            state.advance(proposal, found)
            advancing += time.perf_counter() - started
        expected = self._expected.setdefault((index, temperature), state.new_tokens)
        if state.new_tokens != expected:
            raise SystemExit(f"prompt {index}: the output is not that of one token a step")
        return Run(state.new_tokens, state.num_steps, fed, drafter, proposing, advancing)

    @staticmethod
    def _found(drawing, packed: torch.Tensor, root: int) -> VerificationResult:
        successors, _, top_k = drawing.unpack(packed.numpy())
        return VerificationResult.from_root(root, successors, top_k)

    @torch.inference_mode()
    def _show_prompt(self, drafter: SamDrafter, drawing, prompt: list[int]) -> None:
        logits = self.model.model(torch.tensor([prompt])).logits[0].float()
        tree = DecodingState(prompt, DecodingRules(1), drafter).propose_prefill().tree
        packed, _ = drawing.draw(logits, tree, [0] * len(prompt), prompt)
        drafter.note_prompt(prompt, drawing.unpack(packed.numpy())[2])

    def decode_all(self, settings, degree: int = 1, temperature: float = 0.0) -> list[Run]:
        """All prompts in order; the first time, one token a step is decoded beside, to compare with."""
        plain = LookaheadConfig(W=0, N=2, G=0, drafter="paper")
        for index in range(len(self.prompts)):
            if (index, temperature) not in self._expected:
                self.decode(index, plain, temperature=temperature)
        self.draft_tables.clear()
        return [self.decode(index, settings, degree, temperature) for index in range(len(self.prompts))]


def ratio(runs: list[Run]) -> float:
    return sum(len(run.tokens) for run in runs) / sum(run.steps for run in runs)


def tokens_a_step(runs: list[Run]) -> float:
    return sum(run.fed for run in runs) / max(1, sum(run.steps - 1 for run in runs))


def least_repetitive(runs: list[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.repeated)[: max(1, len(runs) // 3)]


class Study:
    """Rows of one study: printed as they come, then written."""

    def __init__(self, name: str, bench: Bench, output: Path | None):
        self.name, self._bench, self._output = name, bench, output
        self.rows: list[dict] = []

    def add(self, label: str, settings, degree: int = 1, temperature: float = 0.0, **more) -> list[Run]:
        started = time.perf_counter()
        runs = self._bench.decode_all(settings, degree, temperature)
        row = {
            "what": label,
            "degree": degree,
            "temperature": temperature,
            "tokens a step": tokens_a_step(runs),
            "S": ratio(runs),
            "S, least repetitive": ratio(least_repetitive(runs)),
            "4-grams repeated": float(np.mean([run.repeated for run in runs])),
            **more,
        }
        self.rows.append(row)
        print(f"{self.name}: {label} R={degree} S {row['S']:.3f} {time.perf_counter() - started:.0f}s", file=sys.stderr)
        return runs

    def table(self) -> str:
        columns = list(self.rows[0])
        shown = [[f"{v:.3g}" if isinstance(v, float) and v >= 100 else f"{v:.3f}" if isinstance(v, float) else v
                  for v in (row.get(column, "") for column in columns)] for row in self.rows]  # fmt: skip
        return markdown(columns, shown)

    def write(self, head: str) -> None:
        print(f"\n## {self.name}\n\n{head}\n\n{self.table()}\n", flush=True)
        if self._output:
            self._output.mkdir(parents=True, exist_ok=True)
            (self._output / f"{self.name}.md").write_text(f"{head}\n\n{self.table()}\n")
            (self._output / f"{self.name}.json").write_text(json.dumps({"head": head, "rows": self.rows}, indent=1))
            plot(self.name, self.rows, self._output / f"{self.name}.svg")


def plot(name: str, rows: list[dict], path: Path) -> None:
    """S against tokens a step, a line for each label and degree; left out without matplotlib."""
    if name not in ("drafters", "degrees"):
        return
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row.get("line", row["what"]), []).append((row.get("x", row["tokens a step"]), row["S"]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(rows[0].get("x label", "tokens fed a step"))
    axes.set_ylabel("S")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def drafters(study: Study, bench: Bench) -> None:
    for setting in ((5, 3, 5), (7, 5, 7), (15, 5, 15)):
        study.add(f"paper {setting}", paper(*setting), line="paper")
        study.add(f"paper {setting}, guesses alone", paper(*setting, acceptance="guesses"), line="paper, guesses alone")
    study.add("prompt lookup", LookaheadConfig(drafter="prompt_lookup"), line="prompt lookup")
    study.add("token recycling", LookaheadConfig(drafter="recycling"), line="token recycling")
    study.add("SAM decoding with a recycling tree", SamDrafter, line="SAM decoding")
    for budget in BUDGETS:
        study.add(f"full, {budget}", full(budget), line="full")
        study.add(f"full, {budget}, prior=none", full(budget, prior="none"), line="full, prior=none")


def headline(study: Study, bench: Bench) -> None:
    """The baselines and what is held against each; with and without --eos."""
    study.add("paper (15, 5, 15)", paper(15, 5, 15))
    study.add("prompt lookup", LookaheadConfig(drafter="prompt_lookup"))
    study.add("token recycling", LookaheadConfig(drafter="recycling"))
    study.add("SAM decoding with a recycling tree", SamDrafter)
    study.add("full, 54", full(54))
    study.add("full, 83", full(83))


def degrees(study: Study, bench: Bench) -> None:
    for budget in (16, 83):
        for degree in DEGREES:
            more = {"line": f"full, {budget} a replica", "x": degree * budget, "x label": "tokens a step, all replicas"}
            study.add(f"full, {budget}", full(budget, degree), degree, **more)
    for degree in DEGREES:  # the paper's weak scaling: window and guesses grow with the replicas
        W = 15 * degree
        more = {"line": "paper, W = G = 15 a replica", "x": degree * 120, "x label": "tokens a step, all replicas"}
        study.add(f"paper ({W}, 5, {W})", paper(W, 5, W), degree, **more)


def ablation(study: Study, bench: Bench) -> None:
    """The paper's table 3, and what each source is worth."""
    study.add("paper: window and pool, from the prompt, too", paper(15, 5, 15))
    study.add("paper: no prompt in the pool", paper(15, 5, 15, pool_from_prompt=False))
    study.add("paper: no window", paper(0, 5, 15))
    study.add("paper: a small window", paper(5, 5, 15))
    study.add("paper: no guesses", paper(15, 5, 0))
    study.add("paper: Jacobi decoding", paper(15, 2, 0))
    study.add("full", full(83))
    study.add("full, prior=none", full(83, prior="none"))


def sampling(study: Study, bench: Bench) -> None:
    for temperature in (1.0, 0.7):
        study.add("paper (15, 5, 15)", paper(15, 5, 15), temperature=temperature)
        study.add("token recycling", LookaheadConfig(drafter="recycling"), temperature=temperature)
        for budget in (16, 54, 83):
            study.add(f"full, {budget}", full(budget), temperature=temperature)
        study.add("full, 83, prior=none", full(83, prior="none"), temperature=temperature)


def draft_tables(study: Study, bench: Bench) -> None:
    for budget in (16, 83):
        study.add(f"full, {budget}, draft_tables=request", full(budget))
        study.add(f"full, {budget}, draft_tables=runtime", full(budget, draft_tables="runtime"))


def categories(study: Study, bench: Bench) -> None:
    for label, settings in (
        ("paper (15, 5, 15)", paper(15, 5, 15)),
        ("prompt lookup", LookaheadConfig(drafter="prompt_lookup")),
        ("token recycling", LookaheadConfig(drafter="recycling")),
        ("full, 54", full(54)),
        ("full, 83", full(83)),
    ):
        runs = study.add(label, settings)
        kinds = [kind for kind, _ in bench.prompts]
        for kind in dict.fromkeys(kinds):
            chosen = [run for run, of in zip(runs, kinds, strict=True) if of == kind]
            study.rows[-1][kind] = ratio(chosen)


def sources(study: Study, bench: Bench) -> None:
    """Accepted / fed by source and depth."""
    for label, settings, temperature in (("full, 83", full(83), 0.0), ("full, 83, T=1", full(83), 1.0)):
        runs = study.add(label, settings, temperature=temperature)
        study.rows.pop()
        fed = sum(run.drafter.counts.fed for run in runs)
        accepted = sum(run.drafter.counts.accepted for run in runs)
        for name, took, had in zip(runs[0].drafter.counts.sources, accepted, fed, strict=True):
            row = {"what": f"{label}: {name}", "all": f"{took.sum()}/{had.sum()}"}
            for depth in (1, 2, 3, 4, 6, 8, 12, 16):
                row[f"depth {depth}"] = f"{took[depth - 1]}/{had[depth - 1]}"
            study.rows.append(row)


def host(study: Study, bench: Bench) -> None:
    """Milliseconds a step of proposing and advancing on the host; nothing else must run on the machine."""
    for temperature in (0.0, 1.0):
        for budget in (16, 128, 1024):
            runs = study.add(f"full, {budget}", full(budget), temperature=temperature)
            num_steps = sum(run.steps - 1 for run in runs)
            study.rows[-1]["propose ms"] = 1000 * sum(run.proposing for run in runs) / num_steps
            study.rows[-1]["advance ms"] = 1000 * sum(run.advancing for run in runs) / num_steps


STUDIES = (drafters, headline, degrees, ablation, sampling, draft_tables, categories, sources, host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=[study.__name__ for study in STUDIES])
    parser.add_argument("--model", default=None, help="directory or hub id; the demo model if not given")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE:FIELD")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--each", type=int, default=1 << 30, help="prompts of each category at most")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--eos", action="store_true", help="stop at the end of the text, else go on past it")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    bench = Bench(args)
    names = ", ".join(Path(source.rpartition(":")[0]).stem for source in args.prompts)
    head = f"{len(bench.prompts)} prompts ({names}), {args.max_new_tokens} new tokens each"
    head += f"{' at most, to the end of the text' if args.eos else ''}; {machine()}"
    for study in STUDIES:
        if study.__name__ in args.studies:
            results = Study(study.__name__, bench, args.output)
            study(results, bench)
            results.write(head)


if __name__ == "__main__":
    main()
