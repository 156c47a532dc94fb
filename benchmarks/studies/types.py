"""Checks every type of transformers' causal LM mapping: is it decoded like `generate`, or refused?

    python benchmarks/correctness.py types                                   # 189 types, about 10 minutes on a core
    python benchmarks/correctness.py types --only doge llama4_text --seeds 5
    python benchmarks/correctness.py types --markdown types.md               # the table of docs/models.md

Each type is tried with small random models in float32: with its default fields; with every field that may be a length
over positions or keys set below and above the prompt of the self-check, one at a time; and with layers that share keys.
A model decodes prompts of 1, 12 and 70 tokens, 48 tokens each, greedily, by `generate` and by the drop-in with W=7,
N=5, G=7. The exit status is 1 if any output is wrong, or if the drop-in fails with anything but a one-line error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from common import Results
from support.causal_configs import DEFAULT, SHORT_TOKENS, TYPES, variants_of
from support.causal_types import KINDS, Outcome, outcome_of

ORDER = tuple(reversed(KINDS))  # from the worst to the best
BAD = ("wrong", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--only", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE", help="model types")
    parser.add_argument("--seeds", type=int, default=3, help="models of a variant with a length above the self-check's")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of types by outcome there")


def outcome_of_variant(model_type: str, variant: str, num_seeds: int) -> Outcome:
    """Return the worst outcome of a variant of a type.

    Args:
        model_type: one of TYPES.
        variant: a key of `variants_of`.
        num_seeds: number of models to try if the self-check's shortest prompt does not reach the length that the
            variant sets; other variants are tried once.
    """
    changes = variants_of(model_type)[variant]
    outcomes = []
    for seed in range(max(1, num_seeds) if variant.endswith(f"={SHORT_TOKENS[-1]}") else 1):
        with contextlib.redirect_stdout(io.StringIO()):  # some types print
            outcomes.append(outcome_of(model_type, changes, seed=seed))
        if outcomes[-1].kind != "exact":
            break
    return min(outcomes, key=lambda outcome: ORDER.index(outcome.kind))


def general_reason(model_type: str, reason: str) -> str:
    """Return a reason without parts specific to one type or prompt, to group types with the same reason."""
    reason = re.sub(
        rf"^({re.escape(model_type)}\w*|{re.escape(model_type.split('_')[0])}\w*|[A-Z]\w+)(:| )", "", reason
    )
    reason = re.sub(r" by [0-9.e+-]+ \(", " by ... (", reason).strip()
    return reason[:200].replace("|", "/")


def markdown(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """Return a table of types by the outcome of their default variant, and one of variants that differ."""
    groups: dict[tuple[str, str], list[str]] = {}
    differing = ["| type | variant | outcome |", "| --- | --- | --- |"]
    for (model_type, variant), outcome in outcomes.items():
        if variant == DEFAULT:
            reason = "" if outcome.kind == "exact" else general_reason(model_type, outcome.reason)
            groups.setdefault((outcome.kind, reason), []).append(model_type)
        elif outcome.kind != outcomes[model_type, DEFAULT].kind:
            differing.append(f"| {model_type} | {variant} | {outcome.kind}: {outcome.reason} |")
    table = ["| outcome | types | which |", "| --- | --- | --- |"]
    for (kind, reason), types in sorted(groups.items(), key=lambda each: (-ORDER.index(each[0][0]), -len(each[1]))):
        table.append(f"| {kind}{': ' if reason else ''}{reason} | {len(types)} | {', '.join(types)} |")
    return "\n".join(table) + "\n\nOther variants, where the outcome is another:\n\n" + "\n".join(differing) + "\n"


def summary(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """Return the number of types and variants by outcome; a type has the worst outcome of its variants."""
    worst: dict[str, str] = {}
    for (model_type, _), outcome in outcomes.items():
        worst[model_type] = min(worst.get(model_type, outcome.kind), outcome.kind, key=ORDER.index)
    by_default = Counter(outcome.kind for (_, variant), outcome in outcomes.items() if variant == DEFAULT)
    by_worst, by_variant = Counter(worst.values()), Counter(outcome.kind for outcome in outcomes.values())
    lines = [
        f"{kind}: {by_default[kind]} types by default, {by_worst[kind]} by their worst variant, {by_variant[kind]} of"
        f" {len(outcomes)} models ({KINDS[kind]})"
        for kind in KINDS
        if by_variant[kind] or kind in BAD
    ]
    return "\n".join(lines)


def try_types(types: Sequence[str], num_seeds: int, results: Results) -> dict[tuple[str, str], Outcome]:
    """Return the outcomes by type and variant; add a row of results as soon as each is known.

    Args:
        types: model types.
        num_seeds: see `outcome_of_variant`.
        results: gets the rows.
    """
    outcomes: dict[tuple[str, str], Outcome] = {}
    for model_type in types:
        for variant in variants_of(model_type):
            outcome = outcome_of_variant(model_type, variant, num_seeds)
            outcomes[model_type, variant] = outcome
            results.add({"type": model_type, "variant": variant, "outcome": outcome.kind, "reason": outcome.reason})
    return outcomes


def run(args: argparse.Namespace) -> int:
    """Try every type; return 1 if any output is wrong or the drop-in fails without a one-line error."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = Results("types", args.output)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers about foreign models
        outcomes = try_types(args.only, args.seeds, results)
    results.finish(summary(outcomes))
    if args.markdown is not None:
        args.markdown.write_text(markdown(outcomes))
    for (model_type, variant), outcome in outcomes.items():
        if outcome.kind in BAD:
            print(f"{outcome.kind}: {model_type}, {variant}: {outcome.reason}", file=sys.stderr)
    return 1 if any(outcome.kind in BAD for outcome in outcomes.values()) else 0
