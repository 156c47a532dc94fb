"""Compares lookahead decoding with one token per step, over random cases: one seed, one output.

    python benchmarks/correctness.py identity                       # 500 cases, about 5 minutes on 2 cores
    python benchmarks/correctness.py identity --cases 50 --seed 1

A case is a family of models, W, N, G, a number of replicas from 1 to 4 (real processes that meet over gloo), a prompt,
sampling settings with a seed (or greedy decoding), and where to stop. Every rank's tokens must equal those of this
runtime's decoding of one token per step on one replica, and, if decoding is greedy, those of transformers' `generate`.
The exit status is 1 after a mismatch, or if the comparison does not notice deliberately wrong noise.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from common import Results, generate_greedily, tokens_and_report
from support.ranks import run_ranks
from support.small_models import FAMILIES, random_model

from lp_runtime import LookaheadConfig, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.sampling.gumbel import GumbelNoise
from lp_runtime.sampling.sampler import Sampler

NUM_WRONG = 20  # maximum sampled cases that are decoded with wrong noise
CHOSEN = sorted(FAMILIES.keys() - {"phi3_longrope"})  # its context is too short for these cases


@dataclass(frozen=True)
class Case:
    """A request to decode.

    Attributes:
        family: family of the model, a key of FAMILIES.
        num_replicas: number of replicas that share each step.
        request: the request.
    """

    family: str
    num_replicas: int
    request: Request


class Output(NamedTuple):
    """Output of one rank.

    Attributes:
        token_ids: new tokens.
        num_steps: the prefill's step included.
    """

    token_ids: list[int]
    num_steps: int


class DepthNoise(GumbelNoise):
    """Deliberately wrong noise: depends on the depth in the tree instead of the absolute position."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return super().at([position - min(positions) for position in positions])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)


def random_sampling(rng: random.Random) -> SamplingConfig:
    """Return sampling settings; one in five is greedy."""
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
    return replace(
        sampling,
        repetition_penalty=rng.choice([None, None, 1.2]),
        no_repeat_ngram_size=rng.choice([None, None, 3]),
        bad_words_ids=rng.choice([None, None, [[3], [5, 6]]]),
        min_new_tokens=rng.choice([None, None, 10]),
        logit_bias=rng.choice([None, None, {4: 2.0, 9: -1.0}]),
    )


def random_cases(num_cases: int, seed: int) -> list[Case]:
    """Return cases chosen by a seeded generator."""
    rng = random.Random(seed)
    cases = []
    for _ in range(num_cases):
        sampling = random_sampling(rng)
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
        cases.append(Case(rng.choice(CHOSEN), rng.randint(1, 4), request))
    return cases


def make_model(family: str) -> ModelRunner:
    """Return a random model of a family; it is identical in every process."""
    name, settings = FAMILIES[family]
    return ModelRunner(random_model(name, seed=1, initializer_range=0.3, **settings), prefill_chunk=16)


def decode(model: ModelRunner, request: Request, group: Group, sampler: Sampler | None = None) -> Output:
    """Decode a request as one replica of a group; `sampler` is that of the request by default."""
    token_ids, report = tokens_and_report(Engine(model, group).run(request, sampler))
    return Output(token_ids, report.num_steps)


def decode_all(group: Group, cases: Sequence[Case]) -> list[Output]:
    """Decode the cases in turn, in the process of a rank."""
    models = {family: make_model(family) for family in sorted({case.family for case in cases})}
    return [decode(models[case.family], case.request, group) for case in cases]


def decode_on_replicas(cases: Sequence[Case], num_replicas: int) -> list[list[Output]]:
    """Decode the cases on a group of processes; return [ranks][cases] outputs."""
    outputs = run_ranks(decode_all, num_replicas, cases)
    for output in outputs:
        if isinstance(output, Exception):
            raise output
    return outputs


def is_plain_greedy(request: Request) -> bool:
    """Return whether transformers' greedy decoding without any settings must give the request's output."""
    return request.sampling == SamplingConfig()


def generate(model: ModelRunner, request: Request) -> list[int]:
    """Return the new tokens of transformers' greedy decoding."""
    return generate_greedily(model.model, request.prompt_ids, request.max_new_tokens, request.eos_token_ids)


def wrong_noise_is_noticed(cases: Sequence[Case]) -> bool:
    """Return whether the comparison notices noise by depth in the tree instead of position."""
    for case in cases[:NUM_WRONG]:
        outputs = []
        for lookahead in (case.request.lookahead, PLAIN):
            model, request = make_model(case.family), replace(case.request, lookahead=lookahead)
            sampler = make_sampler(model, request)
            assert request.sampling.seed is not None
            wrong = DepthNoise(request.sampling.seed, request.sample, model.vocabulary_size, model.device)
            outputs.append(decode(model, request, Group.alone(), replace(sampler, noise=wrong)).token_ids)
        if outputs[0] != outputs[1]:
            return True
    return False


def compare(cases: Sequence[Case], models: Mapping[str, ModelRunner], num_replicas: int) -> dict[str, int | float]:
    """Decode cases on `num_replicas` replicas, compare every rank's tokens, and return a row of results."""
    ranks = decode_on_replicas(cases, num_replicas)
    num_wrong, num_steps, num_tokens, num_greedy = 0, 0, 0, 0
    for i, case in enumerate(cases):
        model = models[case.family]
        expected, _ = decode(model, replace(case.request, lookahead=PLAIN), Group.alone())
        if is_plain_greedy(case.request):
            num_greedy += 1
            num_wrong += generate(model, case.request) != expected
        if any(outputs[i].token_ids != expected for outputs in ranks):
            num_wrong += 1
            print("mismatch:", case, file=sys.stderr)
        num_tokens, num_steps = num_tokens + len(expected), num_steps + ranks[0][i].num_steps
    row: dict[str, int | float] = {"replicas": num_replicas, "cases": len(cases), "of these plain greedy": num_greedy}
    row |= {"families": len({case.family for case in cases}), "mismatches": num_wrong}
    return row | {"S": num_tokens / num_steps}


def run(args: argparse.Namespace) -> int:
    """Decode every case; return 1 after a mismatch."""
    torch.set_num_threads(1)
    cases = random_cases(args.cases, args.seed)
    models = {family: make_model(family) for family in sorted({case.family for case in cases})}
    results = Results("identity", args.output)
    num_mismatches = 0
    for num_replicas in range(1, 5):
        mine = [case for case in cases if case.num_replicas == num_replicas]
        if mine:
            row = compare(mine, models, num_replicas)
            num_mismatches += int(row["mismatches"])
            results.add(row)
    results.finish(f"seed {args.seed}")
    if not wrong_noise_is_noticed([case for case in cases if case.request.sampling.seed is not None]):
        print("the comparison does not notice wrong noise", file=sys.stderr)
        return 1
    return 1 if num_mismatches else 0
