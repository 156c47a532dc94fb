"""The drafting studies: which drafters and settings each compares."""

from __future__ import annotations

import numpy as np
from common import Value
from peers import SamDrafter

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.lookahead.drafters.best_first import starting_rates as starting
from lp_runtime.model.kv_cache.slots import STEP_TOKENS
from studies.drafting_bench import GREEDY
from studies.drafting_peers import SAM, peers, peers_kept, peers_sampled
from studies.drafting_table import (
    PROMPT_LOOKUP,
    RECYCLING,
    Study,
    full,
    paper,
    step_tokens,
)
from studies.recorded_text import save_texts
from studies.starting_rates import (
    Watcher,
    fit,
    load_contexts,
    promised_and_accepted,
    save_contexts,
    source_of,
)

BUDGETS = (16, 32, 46, 54, 83, 160, 320, 640)
DEGREES = (1, 2, 4, 8, 16)
FIXED = (1, 4, 8, 16, 32, 64)  # step tokens
# Milliseconds per step by step tokens: machine A with SmolLM2-135M in float32, another CPU, a GPU.
STEP_MS: dict[str, dict[int, float]] = {
    "machine A": {1: 43, 8: 48, 16: 54, 24: 66, 32: 79, 64: 115, 128: 230},
    "CPU": {1: 30, 2: 33, 4: 38, 8: 46, 16: 62, 32: 95, 64: 165, 128: 310},
    "GPU": {1: 9.0, 64: 9.4, 128: 11.0, 256: 16.0},
}
# Milliseconds per step of a one-thread replica on machine A; the real model inflated to 337M parameters, float32.
THREAD_MS: dict[int, float] = dict(
    zip(
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
        (37.1, 39.5, 42.7, 43.3, 46.9, 53.8, 63.0, 76.1, 113.8, 150, 300),
        strict=True,
    )
)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # columns of the study `sources`


def drafters(study: Study) -> None:
    """S of every drafter, by step tokens."""
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
    """S of the baselines and of the drafter `full`; run it with and without --eos."""
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
            study.add(f"full, {budget}", full(budget), degree, line=line, x=degree * budget)
    for degree in DEGREES:  # the paper's weak scaling: window and guesses grow with the replicas
        W = 15 * degree
        line = "paper, W = G = 15 a replica"
        study.add(f"paper ({W}, 5, {W})", paper(W, 5, W), degree, line=line, x=degree * 120)


def replicas(study: Study) -> None:
    """S of 64 tokens a replica, by number of replicas, and of a single replica that feeds as many tokens."""
    for degree in DEGREES:
        study.add("full, 64 a replica", full(64), degree, x=64 * degree)
    for degree in DEGREES[1:]:
        tokens = min(64 * degree, STEP_TOKENS)
        study.add(f"full, {tokens}", full(tokens), line="full, one replica", x=tokens)


def chains(study: Study) -> None:
    """S by number of replicas if each follows one path of the tree, compared with trees of as many tokens."""
    for as_chains in (True, False):
        for budget in (8, 16):
            for degree in DEGREES:
                kind = "one path a replica" if as_chains else "trees"
                study.add(f"{kind}, {budget}", full(budget), degree, x=degree * budget, as_chains=as_chains)


def ablation(study: Study) -> None:
    """The paper's table 3, and the contribution of each draft source."""
    study.add("paper: window and pool, from the prompt, too", paper(15, 5, 15))
    study.add("paper: no prompt in the pool", paper(15, 5, 15, pool_from_prompt=False))
    study.add("paper: no window", paper(0, 5, 15))
    study.add("paper: a small window", paper(5, 5, 15))
    study.add("paper: no guesses", paper(15, 5, 0))
    study.add("paper: Jacobi decoding", paper(15, 2, 0))
    study.add("full", full(83))
    study.add("full, prior=none", full(83, prior="none"))


def sampling(study: Study) -> None:
    """S of sampled decoding compared with greedy decoding."""
    for settings in (GREEDY, {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}):
        study.add("paper (15, 5, 15)", paper(15, 5, 15), sampling=settings)
        study.add("token recycling", RECYCLING, sampling=settings)
        for W, N, G in ((7, 5, 7), (15, 5, 15)):
            study.add(f"full ({W}, {N}, {G})", LookaheadConfig(W, N, G), sampling=settings)
        for budget in (16, 54, 83):
            study.add(f"full, {budget}", full(budget), sampling=settings)
        study.add("full, 83, prior=none", full(83, prior="none"), sampling=settings)


def draft_tables(study: Study) -> None:
    """S with draft tables of one request, compared with draft tables that outlive requests."""
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
    for label, settings in methods:
        study.add(label, settings)


def sources(study: Study) -> None:
    """Accepted / fed draft tokens, by source and depth."""
    for label, settings in (("full, 83", GREEDY), ("full, 83, temperature 1", {"temperature": 1.0})):
        runs = study.bench.decode_all(full(83), sampling=settings)
        fed = np.sum([run.drafter.counts.fed for run in runs], axis=0)
        accepted = np.sum([run.drafter.counts.accepted for run in runs], axis=0)
        for name, took, had in zip(runs[0].drafter.counts.sources, accepted, fed, strict=True):
            row: dict[str, Value] = {"source": f"{label}: {name}", "all": f"{took.sum()}/{had.sum()}"}
            row |= {f"depth {depth}": f"{took[depth - 1]}/{had[depth - 1]}" for depth in DEPTHS}
            study.add_row(row)


def starting_rates(study: Study) -> None:
    """Promised and accepted tokens by level of the estimate, as the run began; fits what estimates start from.

    OUTPUT gets starting rates and constants, fitted on this model and those of --also, and this model's contexts.
    """
    fitted, own = {}, {}
    for name, ways in (("GREEDY", [GREEDY]), ("SAMPLED", [{"temperature": 1.0}, {"temperature": 0.7}])):
        watcher = Watcher()
        study.bench.watch = watcher.watch
        for way in ways:
            study.bench.decode_all(full(64), sampling=way)
        own[name] = watcher.contexts()
        fitted[name] = fit([own[name], *(load_contexts(path)[name] for path in study.also)])
        for lowest, promised, accepted in promised_and_accepted(own[name], getattr(starting, name)):
            study.add_row({"decoding": name, "from": lowest, "promised": promised, "accepted": accepted})
    study.bench.watch = None
    study.write("starting_rates.py", source_of(fitted, "the prompts and the model of the command, and those of --also"))
    if study.output is not None:
        save_contexts(study.output / "starting_rates.npz", own)


def auto(study: Study) -> None:
    """Speed of lookahead=auto relative to the best fixed step tokens, by kind, at given step times."""
    kinds = [kind for kind, _ in study.bench.prompts]
    for machine, step_ms in STEP_MS.items():
        runs = {str(num): study.bench.decode_all(full(num), step_ms=step_ms) for num in FIXED}
        sized = study.bench.decode_all(LookaheadConfig(), step_ms=step_ms)
        for kind in ["all", *dict.fromkeys(kinds)]:
            at = [index for index, each in enumerate(kinds) if kind in ("all", each)]
            seconds = {name: sum(each[index].step_seconds for index in at) for name, each in runs.items()}
            best = min(seconds, key=seconds.__getitem__)
            auto_seconds = sum(sized[index].step_seconds for index in at)
            row: dict[str, Value] = {"step times": machine, "kind": kind, "best fixed": best}
            row |= {"auto over it": seconds[best] / auto_seconds, "auto over 1": seconds["1"] / auto_seconds}
            study.add_row(row | {"auto, step tokens": step_tokens([sized[index] for index in at])})


def recorded_text(study: Study) -> None:
    """Record the model's answers to trees of fixed sizes and of lookahead=auto in OUTPUT, for tests."""
    for num in FIXED[1:]:
        study.add(f"full, {num}", full(num))
    for machine, step_ms in STEP_MS.items():
        study.add_row(study.row(f"auto, {machine}", study.bench.decode_all(LookaheadConfig(), step_ms=step_ms)))
    if study.output is not None:
        save_texts(study.output / "recorded_text.npz", study.bench)


def auto_degrees(study: Study) -> None:
    """Tokens per second of lookahead=auto and of fixed step tokens, on several replicas, at given times."""
    for degree in DEGREES[:-1]:
        sizes = (4, 6, 8, 12) if degree > 1 else (1, 4, 6, 8)
        for label, settings in [("auto", LookaheadConfig()), *((f"full, {num}", full(num)) for num in sizes)]:
            runs = study.bench.decode_all(settings, degree, step_ms=THREAD_MS)
            num_tokens = sum(len(run.tokens) - 1 for run in runs)
            row = study.row(label, runs, degree)
            study.add_row(row | {"tokens/s": num_tokens / sum(run.step_seconds for run in runs)})


def host(study: Study) -> None:
    """Milliseconds per step of proposing and advancing on the host; nothing else must run on the machine."""
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
    replicas,
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
    recorded_text,
    auto,
    auto_degrees,
    host,
)
