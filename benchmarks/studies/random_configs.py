"""Compares models with randomly configured attention, decoded greedily, with transformers' `generate`.

    python benchmarks/correctness.py random_configs                     # 300 configurations of ten families
    python benchmarks/correctness.py random_configs --number 2000 --seed 7

Heads, groups, head sizes, biases, kinds of rotary embeddings, windows, kinds of layers, scales, soft caps and experts
are drawn (tests/support/random_configs.py). Each model decodes prompts of 1, 12 and 70 tokens, 48 tokens each. The exit
status is 1 if any output differs, or if a model is refused.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter

import torch
import transformers
from common import Results
from support.causal_types import outcome_of
from support.random_configs import FAMILIES, random_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--number", type=int, default=300, help="number of configurations; families take turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of the configurations, weights and prompts")


def run(args: argparse.Namespace) -> int:
    """Try every configuration; return 1 if any output differs, or a model is refused."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = Results("random_configs", args.output)
    outcomes: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}
    rng = random.Random(args.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers
        for number in range(args.number):
            family = list(FAMILIES)[number % len(FAMILIES)]
            fields, seed = random_fields(family, rng), rng.randrange(1 << 30)
            outcome = outcome_of(family, fields, seed=seed)
            outcomes[family][outcome.kind] += 1
            if outcome.kind != "exact":
                print(f"{outcome.kind}: {family} {fields} seed {seed}: {outcome.reason}", file=sys.stderr, flush=True)
    for family, counts in outcomes.items():
        others = sum(counts.values()) - counts["exact"] - counts["near tie"]
        results.add({"family": family, "exact": counts["exact"], "near tie": counts["near tie"], "other": others})
    results.finish(
        f"{args.number} random configurations, seed {args.seed}, prompts of 1, 12 and 70 tokens, 48 new ones"
    )
    return 1 if any(set(counts) - {"exact", "near tie"} for counts in outcomes.values()) else 0
