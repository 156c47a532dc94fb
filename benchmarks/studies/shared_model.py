"""Uses one model in several threads, with interrupts: are outputs right and the model unchanged?

    python benchmarks/correctness.py shared_model                       # 1,000 calls from 4 threads, 200 interrupts

Calls are drawn from the drop-in with exactness=fast and strict, sampled, and plain `generate`, on one random model.
An interrupt is Ctrl-C at a random moment of a call. The exit status is 1 if any output differs from that of one thread,
any call fails, or the model is changed.
"""

from __future__ import annotations

import argparse
import functools
import random

import torch
from common import Results
from support.shared_model import call, interrupted, num_calls_of, run_threads, state_of
from support.small_models import random_model

PROMPT = [3, 5, 7, 11, 3, 5]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--calls", type=int, default=1000, help="calls of all threads together")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--interrupts", type=int, default=200, help="half of them with exactness=fast, half strict")


def run(args: argparse.Namespace) -> int:
    """Run threads, then interrupts; return 1 if anything went wrong."""
    torch.set_num_threads(1)
    model = random_model(seed=3, initializer_range=0.3)
    before, results = state_of(model), Results("shared_model", args.output)
    wrong, errors = run_threads(model, args.calls, args.threads)
    changed = int(state_of(model) != before)
    num_bad = wrong + len(errors) + changed
    what = f"calls from {args.threads} threads"
    results.add({"what": what, "number": args.calls, "wrong": wrong, "errors": len(errors), "model changed": changed})
    rng = random.Random(1)
    for kind in ("fast", "strict"):
        expected = call(model, kind, PROMPT)
        decode = functools.partial(call, model, kind, PROMPT)
        num_calls = num_calls_of(decode)
        number = args.interrupts // 2
        num_interrupted = num_changed = num_wrong = 0
        for _ in range(number):
            num_interrupted += interrupted(decode, rng.randint(1, num_calls))
            num_changed += state_of(model) != before
            num_wrong += call(model, kind, PROMPT) != expected
        num_bad += num_changed + num_wrong
        results.add(
            {
                "what": f"interrupts, exactness={kind} ({num_interrupted} ended a call)",
                "number": number,
                "wrong": num_wrong,
                "errors": 0,
                "model changed": num_changed,
            }
        )
    results.finish("a random Llama of two layers, 12 new tokens a call")
    for error in sorted(set(errors)):
        print(error)
    return 1 if num_bad else 0
