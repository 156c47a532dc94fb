"""Compares constrained text with masked decoding of one token per step, over random draws.

    python benchmarks/correctness.py constraints                       # 300 draws, about 5 minutes on 2 cores
    python benchmarks/correctness.py constraints --draws 50 --seed 1

A draw is a JSON schema, a regular expression, a grammar or a list of choices; a family of models; W, N, G, a drafter
and a budget; sampling settings with a seed (or greedy decoding), penalties and biases; and a number of replicas from 1
to 3 (real processes). Every rank's tokens must be those of tests/support/constrained.py, which masks the logits of
transformers' own forward passes with xgrammar's matcher, one token at a time. Every text that has ended must satisfy
its constraint, by jsonschema or by a regular expression of Python. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections.abc import Sequence
from multiprocessing.queues import Queue

import torch
from common import Results
from support.constrained import Draw, decode, is_valid, random_draw, reference, runner
from support.small_models import FAMILIES

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.process_group import GroupOptions, process_group
from lp_runtime.distributed.store import host_store
from lp_runtime.distributed.transport.group import CPU

TIMEOUT_SECONDS = 1200.0  # for a group's processes
CHOSEN = ("llama", "mistral", "qwen3", "gemma3", "gpt2", "phi3", "mixtral", "olmo2")
MAX_REPLICAS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--draws", type=int, default=300, help="at least 3, one for each number of replicas")
    parser.add_argument("--seed", type=int, default=0)


def run_rank(draws: Sequence[tuple[str, Draw]], rank: int, num_replicas: int, port: int, results: Queue) -> None:
    """Decode the draws in turn, in the process of a rank, and put (rank, outputs) into `results`."""
    torch.set_num_threads(1)
    context = ReplicaContext(rank, num_replicas, host="127.0.0.1", port=port)
    with process_group(context, CPU, GroupOptions(TIMEOUT_SECONDS)) as group:
        results.put((rank, [decode(model_of(family), draw.request, group) for family, draw in draws]))


def model_of(family: str):
    """Return the model of a family; it is identical in every process."""
    name, settings = FAMILIES[family]
    return runner(name, **{key: value for key, value in settings.items() if not isinstance(value, list)})


def decode_on_replicas(draws: Sequence[tuple[str, Draw]], num_replicas: int) -> list[list[tuple[list[int], int, str]]]:
    """Decode the draws on a group of processes; return [ranks][draws] outputs."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    store = host_store("127.0.0.1", 0, TIMEOUT_SECONDS)
    processes = [
        spawn.Process(target=run_rank, args=(draws, rank, num_replicas, store.port, results), daemon=True)
        for rank in range(num_replicas)
    ]
    for process in processes:
        process.start()
    outputs = dict(results.get(timeout=TIMEOUT_SECONDS) for _ in processes)
    for process in processes:
        process.join(TIMEOUT_SECONDS)
    return [outputs[rank] for rank in range(num_replicas)]


def compare(draws: Sequence[tuple[str, Draw]], num_replicas: int) -> dict[str, int | float]:
    """Decode draws on `num_replicas` replicas, compare every rank's tokens, and return a row of results."""
    ranks = decode_on_replicas(draws, num_replicas)
    num_wrong = num_steps = num_tokens = num_ended = num_invalid = 0
    for i, (family, draw) in enumerate(draws):
        expected = reference(model_of(family).model, draw)
        tokens, steps, reason = ranks[0][i]
        if any(outputs[i][0] != expected for outputs in ranks):
            num_wrong += 1
            print("mismatch:", family, draw.constraint, draw.request, file=sys.stderr)
        if reason == "eos":
            num_ended += 1
            if not is_valid(draw.constraint, tokens):
                num_invalid += 1
                print("invalid:", draw.constraint, tokens, file=sys.stderr)
        num_tokens, num_steps = num_tokens + len(tokens), num_steps + steps
    row: dict[str, int | float] = {"replicas": num_replicas, "draws": len(draws), "mismatches": num_wrong}
    row |= {"sampled": sum(draw.request.sampling.seed is not None for _, draw in draws)}
    return row | {"ended": num_ended, "of these invalid": num_invalid, "S": num_tokens / num_steps}


def run(args: argparse.Namespace) -> int:
    """Decode every draw; return 1 after a mismatch or an invalid text."""
    if args.draws < MAX_REPLICAS:
        raise SystemExit(f"--draws {args.draws}: must be at least {MAX_REPLICAS}, one for each number of replicas")
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    draws = [(rng.choice(CHOSEN), random_draw(rng)) for _ in range(args.draws)]
    results = Results("constraints", args.output)
    num_bad = 0
    for num_replicas in range(1, MAX_REPLICAS + 1):
        row = compare(draws[num_replicas - 1 :: MAX_REPLICAS], num_replicas)
        num_bad += int(row["mismatches"]) + int(row["of these invalid"])
        results.add(row)
    results.finish(f"{args.draws} draws, seed {args.seed}, {len(CHOSEN)} families of models")
    return 1 if num_bad else 0
