"""Compares texts of random tokens with transformers' decode and StopStringCriteria, by tokenizer kind.

    python benchmarks/correctness.py text                              # 2,000 sequences of each kind and check
    REAL_MODELS=/tmp/lp_models/real python benchmarks/correctness.py text --kinds real_real

Prompt, new tokens and steps are drawn at random: texts, bytes, special tokens, and tokens that decode to no text.
Checks: deltas join to the text that decode gives; texts of tokens join to it, and do not depend on steps; bytes of
tokens join to its UTF-8; stop strings end it where it first contains one. StopStringCriteria gets a tenth of the
sequences. The table counts failures; the smallest failing inputs go to stderr. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from common import Results
from support.text_checks import CHECKS, criteria_fault, fault_of, kinds_of, smallest_fault
from support.token_sequences import RandomTokens
from support.tokenizer_kinds import KINDS, tokenizer_of

NUM_SHRUNK = 5  # faults per kind and check whose input is shrunk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--sequences", type=int, default=2000, help="sequences per kind and check")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Check every kind; return 1 if any check failed."""
    results, num_bad = Results("text", args.output), 0
    for kind in args.kinds:
        row: dict[str, str | int | None] = {"kind": kind}
        started = time.perf_counter()
        smallest: list[str] = []
        for name in args.checks:
            if kind not in kinds_of(CHECKS[name], [kind]):
                row[name] = None
                continue
            faults = faults_of(kind, name, args)
            row[name] = len(faults)
            num_bad += len(faults)
            smallest += [f"{kind}, {name}: {min(faults[:NUM_SHRUNK], key=len)}"] if faults else []
        results.add(row | {"seconds": round(time.perf_counter() - started)})
        print(*smallest, sep="\n", end="\n" if smallest else "", file=sys.stderr, flush=True)
    results.finish(f"failures of {args.sequences} random sequences of each kind and check, seed {args.seed}")
    return 1 if num_bad else 0


def faults_of(kind: str, name: str, args: argparse.Namespace) -> list[str]:
    """Return the faults of a check with a kind; the inputs of the first ones are shrunk."""
    tokenizer, check = tokenizer_of(kind), CHECKS[name]
    source = RandomTokens(tokenizer, random.Random(f"{kind} {name} {args.seed}"))
    faults: list[str] = []
    num = max(1, args.sequences // 10) if check is criteria_fault else args.sequences
    for seed in range(num):
        prompt, new = source.prompt(), source.tokens()
        fault = fault_of(check, tokenizer, prompt, new, seed)
        if fault is not None and len(faults) < NUM_SHRUNK:
            fault = smallest_fault(check, tokenizer, prompt, new, seed)
        faults += [fault] if fault is not None else []
    return faults
