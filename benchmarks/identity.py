"""One seed, one output: lookahead decoding against one token a step, over random draws of everything.

    python benchmarks/identity.py                       # 500 draws, about 5 minutes on 2 cores
    python benchmarks/identity.py --draws 50 --seed 1

A draw is a family of models, W, N, G, a number of replicas from 1 to 4 (real processes that meet over gloo), a prompt,
sampling settings with a seed (or greedy decoding), and where to stop. Every rank's tokens must be those of our own
decoding of one token a step on one replica, and, where decoding is greedy, those of transformers' `generate`. The exit
status is 1 after a mismatch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace

import torch
from common import machine, markdown
from support.small_models import FAMILIES, random_model

from lp_runtime import LookaheadConfig, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.process_group import host_store, process_group
from lp_runtime.engine.engine import Engine
from lp_runtime.engine.request import Request
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.gumbel import GumbelNoise

CPU = torch.device("cpu")
TIMEOUT = 600.0
DRAWN = sorted(FAMILIES.keys() - {"phi3_longrope"})  # its context is too short for these draws


@dataclass(frozen=True)
class Draw:
    """One case: which model, how many replicas, what request."""

    family: str
    num_replicas: int
    request: Request


def make_draws(num_draws: int, seed: int) -> list[Draw]:
    """Cases drawn by a seeded generator."""
    rng = random.Random(seed)
    draws = []
    for _ in range(num_draws):
        sampling = SamplingConfig()
        if rng.random() < 0.8:
            sampling = SamplingConfig(
                temperature=rng.choice([0.5, 0.7, 1.0, 1.3]),
                top_k=rng.choice([None, None, 5, 20]),
                top_p=rng.choice([None, None, 0.8, 0.95]),
                min_p=rng.choice([None, None, 0.05]),
                typical_p=rng.choice([None, None, 0.9]),
                seed=rng.getrandbits(64),
            )
        sampling = replace(
            sampling,
            repetition_penalty=rng.choice([None, None, 1.2]),
            no_repeat_ngram_size=rng.choice([None, None, 3]),
            bad_words_ids=rng.choice([None, None, [[3], [5, 6]]]),
            min_new_tokens=rng.choice([None, None, 10]),
            logit_bias=rng.choice([None, None, {4: 2.0, 9: -1.0}]),
        )
        request = Request(
            prompt_ids=tuple(rng.randrange(64) for _ in range(rng.randint(1, 40))),
            lookahead=LookaheadConfig(
                W=rng.choice([0, 1, 3, 5, 7, 15]),
                N=rng.randint(2, 6),
                G=rng.choice([0, 1, 5, 15]),
                drafter=rng.choice(["full", "full", "full", "paper", "paper", "prompt_lookup", "recycling"]),
                prior=rng.choice(["vocabulary", "none"]),
                draft_tables=rng.choice(["request", "runtime"]),
                budget=rng.choice([None, None, 1, 3, 10, 30]),
                pool_from_prompt=rng.random() < 0.7,
                window_seed=rng.randrange(5),
            ),
            max_new_tokens=rng.randint(1, 48),
            eos_token_ids=frozenset(rng.choice([(), (7,), (7, 30, 31)])),
            sampling=sampling,
            sample=rng.randrange(3),
        )
        draws.append(Draw(rng.choice(DRAWN), rng.randint(1, 4), request))
    return draws


def make_model(family: str) -> ModelRunner:
    name, settings = FAMILIES[family]
    return ModelRunner(random_model(name, seed=1, initializer_range=0.3, **settings), prefill_chunk=16)


def decode(model: ModelRunner, request: Request, rank: int = 0, num_replicas: int = 1) -> tuple[list[int], int]:
    """(new tokens, steps)"""
    *runs, report = Engine(model, rank, num_replicas, CPU).run(request)
    return [token for run in runs for token in run.token_ids], report.num_steps


def run_rank(draws: list[Draw], rank: int, num_replicas: int, port: int, results) -> None:
    """A rank's process: decode the draws in turn."""
    torch.set_num_threads(1)
    context = ReplicaContext(rank, num_replicas, host="127.0.0.1", port=port)
    models = {family: make_model(family) for family in sorted({draw.family for draw in draws})}
    with process_group(context, CPU, TIMEOUT):
        results.put((rank, [decode(models[d.family], d.request, rank, num_replicas) for d in draws]))


def on_replicas(draws: list[Draw], num_replicas: int) -> list[list[tuple[list[int], int]]]:
    """[ranks][draws] of what `decode` returned."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    store = host_store("127.0.0.1", 0, TIMEOUT)
    processes = [
        spawn.Process(target=run_rank, args=(draws, rank, num_replicas, store.port, results), daemon=True)
        for rank in range(num_replicas)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=TIMEOUT) for _ in processes)
    for process in processes:
        process.join(TIMEOUT)
    return [found[rank] for rank in range(num_replicas)]


def is_plain_greedy(request: Request) -> bool:
    return request.sampling == SamplingConfig()


def generate(model: ModelRunner, request: Request) -> list[int]:
    """transformers' own greedy decoding."""
    ids = torch.tensor([request.prompt_ids])
    output = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens,
        eos_token_id=sorted(request.eos_token_ids) or -1, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(request.prompt_ids) :].tolist()


def wrong_noise_is_seen(draws: list[Draw]) -> bool:
    """Whether the comparison notices noise that goes by the depth in the tree instead of the position."""

    class ByStep(GumbelNoise):
        def at(self, positions):
            return super().at([position - min(positions) for position in positions])

    import lp_runtime.engine.sequence as decoding

    right, decoding.GumbelNoise = decoding.GumbelNoise, ByStep
    try:
        return any(
            decode(make_model(d.family), d.request)[0]
            != decode(make_model(d.family), replace(d.request, lookahead=PLAIN))[0]
            for d in draws[:20]
        )
    finally:
        decoding.GumbelNoise = right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draws = make_draws(args.draws, args.seed)
    models = {family: make_model(family) for family in DRAWN}
    table, total = [], 0
    for num_replicas in range(1, 5):
        mine = [draw for draw in draws if draw.num_replicas == num_replicas]
        if not mine:
            continue
        ranks = on_replicas(mine, num_replicas)
        wrong, steps, tokens, num_greedy = Counter(), 0, 0, 0
        for i, draw in enumerate(mine):
            model = models[draw.family]
            expected, _ = decode(model, replace(draw.request, lookahead=PLAIN))
            if is_plain_greedy(draw.request):
                num_greedy += 1
                if generate(model, draw.request) != expected:
                    wrong[draw.family] += 1
            if any(found[i][0] != expected for found in ranks):
                wrong[draw.family] += 1
                print("mismatch:", draw, file=sys.stderr)
            tokens, steps = tokens + len(expected), steps + ranks[0][i][1]
        families = len({draw.family for draw in mine})
        table.append([num_replicas, len(mine), num_greedy, families, wrong.total(), f"{tokens / steps:.2f}"])
        print(*table[-1], file=sys.stderr, flush=True)
        total += wrong.total()
    print(f"{machine()}; seed {args.seed}\n")
    print(markdown(["replicas", "draws", "of them plain greedy", "families", "mismatches", "S"], table))
    assert wrong_noise_is_seen([d for d in draws if d.request.sampling.seed is not None]), "this cannot fail"
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
