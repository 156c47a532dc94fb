"""Checks models that are fed chains of guesses, against `generate` or one token per step.

    python benchmarks/correctness.py chains                        # 30 draws each, on 1, 2 and 3 replicas
    python benchmarks/correctness.py chains --types qwen3_next lfm2_moe --draws 100 --gpus 1 4

The models are small and random, of types whose layers carry a state from token to token. Prompts, settings, drafters
and samplers are drawn (tests/support/chain_models.py). Greedy texts are compared with `generate`, sampled ones with one
token per step. A greedy text differs by a near tie if the two best logits hardly differ where it first differs. The
exit status is 1 if any text differs otherwise.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace

import torch
import transformers
from common import Results, generate_greedily
from support.causal_types import NEAR_TIE
from support.chain_models import NEW_TOKENS, RECURRENT, decode, decode_type, model_of, request_of
from support.ranks import run_ranks
from transformers import PreTrainedModel

from lp_runtime.config.lookahead import PLAIN
from lp_runtime.distributed.transport.group import Group
from lp_runtime.request.request import Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--types", nargs="+", default=list(RECURRENT), help="model types of transformers")
    parser.add_argument("--draws", type=int, default=30, help="requests per model")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 3], help="numbers of replicas")


def run(args: argparse.Namespace) -> int:
    """Decode every request on every number of replicas; return 1 if any text is wrong."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # those of transformers
    results = Results("chains", args.output)
    num_wrong = 0
    for model_type in args.types:
        model = model_of(model_type)
        requests = [request_of(number) for number in range(args.draws)]
        expected = [_expected(model, request) for request in requests]
        for gpus in args.gpus:
            ranks = run_ranks(decode_type, gpus, model_type, requests)
            errors = [rank for rank in ranks if isinstance(rank, Exception)]
            if errors:
                raise errors[0]
            pairs = list(zip(ranks[0], requests, expected, strict=True))
            different = [(number, pair) for number, pair in enumerate(pairs) if pair[0][0] != pair[2]]
            ties = [number for number, pair in different if _is_near_tie(model, *pair[1:], pair[0][0])]
            wrong = [number for number, _ in different if number not in ties]
            wrong += [
                number for rank in ranks[1:] for number, output in enumerate(rank) if output[0] != ranks[0][number][0]
            ]
            num_wrong += len(wrong)
            if wrong:
                print(f"wrong: {model_type} gpus={gpus} requests {sorted(set(wrong))}", file=sys.stderr, flush=True)
            steps = sum(report.num_steps for _, report in ranks[0])
            results.add(
                {
                    "model": model_type,
                    "gpus": gpus,
                    "wrong": len(set(wrong)),
                    "near tie": len(ties),
                    "S": round(NEW_TOKENS * len(requests) / steps, 2),
                }
            )
    results.finish(f"{args.draws} requests to each model, {NEW_TOKENS} new tokens, every third one sampled")
    return 1 if num_wrong else 0


def _expected(model: PreTrainedModel, request: Request) -> list[int]:
    """Return the output of `generate` for a greedy request, and of one token per step for a sampled one."""
    if request.sampling.temperature:
        return decode(Group.alone(), model, [replace(request, lookahead=PLAIN)])[0][0]
    return generate_greedily(model, request.prompt_ids, NEW_TOKENS)


@torch.inference_mode()
def _is_near_tie(model: PreTrainedModel, request: Request, expected: list[int], actual: list[int]) -> bool:
    """Return whether the two best logits are nearly equal where two greedy texts first differ."""
    if request.sampling.temperature:
        return False
    first = next(i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b)
    ids = torch.tensor([[*request.prompt_ids, *expected[:first]]])
    best = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values
    return (best[0] - best[1]).item() < NEAR_TIE
