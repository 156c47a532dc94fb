"""Checks the prefix cache: fewer tokens fed, equal outputs, bounded memory.

    python benchmarks/correctness.py prefix_cache --system-tokens 1500 --prompts 500

Conversations of three turns share one system prompt. Every turn is decoded with a prefix cache and without. Then many
different prompts pass through an engine whose cache is small. The exit status is 1 if an output differs, a later turn
feeds more than 0.15 of the tokens that the first turn fed, or the cache holds more than its limit.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

import torch
from common import GREEDY, Results, add_model_argument, tokens_and_report
from support.engines import engine_of

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.engine.engine import Engine
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

FIXED = LookaheadConfig(7, 5, 7, prior="none")
NUM_TURNS = 3
MAX_SHARE = 0.15  # of the first turn's fed tokens; a later turn may feed no more
MAX_KEPT_TOKENS = 4000  # capacity of the small cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_model_argument(parser)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=500)


def _decode(engine: Engine, model: ModelRunner, request: Request) -> tuple[list[int], Report, int]:
    """Return new tokens, the report, and the number of prompt tokens that were fed."""
    before = model.num_prefilled_tokens
    token_ids, report = tokens_and_report(engine.run(request))
    return token_ids, report, model.num_prefilled_tokens - before


def _runner(args: argparse.Namespace, max_bytes_in_tokens: int | None) -> ModelRunner:
    """Return a runner of the model whose prefix cache has a capacity of some tokens; None for no cache."""
    model = ModelRunner(load_model(ModelConfig(args.model), torch.device("cpu"), "float32"), 2048, own_attention=True)
    with model.slots.borrowed() as slot:
        model.begin(slot, 8)
        model.prefill(slot, [1, 2, 3])
    if max_bytes_in_tokens is not None:
        max_bytes = max_bytes_in_tokens * model.cache_bytes_per_token
        model.slots.prefixes = make_prefix_cache(model, max_bytes, 10**6)
    return model


def run(args: argparse.Namespace) -> int:
    """Decode the conversations and the prompts; return 1 if any check fails."""
    rng = random.Random(0)
    model, plain = _runner(args, 10**6), _runner(args, None)
    engine, plain_engine = engine_of(model), engine_of(plain)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, model.vocabulary_size) for _ in range(num_tokens))

    results = Results("prefix_cache", args.output, {"of the first": ".3f"})
    system, first_fed, num_wrong = draw(args.system_tokens), 0, 0
    for conversation in range(args.conversations):
        text = system
        for turn in range(NUM_TURNS):
            text += draw(args.question_tokens)
            request = Request(text, FIXED, args.new_tokens, sampling=GREEDY)
            expected, without, _ = _decode(plain_engine, plain, request)
            tokens, report, num_fed = _decode(engine, model, request)
            first_fed = first_fed or num_fed
            is_right = tokens == expected and (num_fed == first_fed or num_fed <= MAX_SHARE * first_fed)
            num_wrong += not is_right
            results.add(
                {
                    "conversation": conversation + 1,
                    "turn": turn + 1,
                    "prompt": len(text),
                    "fed": num_fed,
                    "of the first": num_fed / first_fed,
                    "steps": report.num_steps,
                    "steps without": without.num_steps,
                    "right": str(is_right),
                }
            )
            text += tuple(tokens)
    results.finish("tokens of prompts, and steps, with a prefix cache; all outputs are those without")
    return 1 if num_wrong + _pass_many(args, draw, engine_of) else 0


def _pass_many(args: argparse.Namespace, draw, make_engine) -> int:
    """Pass different prompts through a small cache; return how often it overflowed or an output was wrong."""
    model, plain = _runner(args, MAX_KEPT_TOKENS), _runner(args, None)
    engine, plain_engine = make_engine(model), make_engine(plain)
    cache, limit = model.slots.prefixes, MAX_KEPT_TOKENS * model.cache_bytes_per_token
    assert cache is not None
    num_wrong, most = 0, 0
    kept = Request(draw(120), FIXED, 2, sampling=GREEDY)
    for _ in range(args.prompts):
        request = replace(kept, prompt_ids=draw(120))
        for each in (request, kept):  # a prompt that is used again and again must stay in the cache
            tokens, report, _ = _decode(engine, model, each)
        num_wrong += cache.num_bytes > limit
        most = max(most, cache.num_bytes)
    num_wrong += report.cached_tokens == 0 or tokens != _decode(plain_engine, plain, kept)[0]
    print(f"{args.prompts} prompts: at most {most} bytes of {limit} kept; {num_wrong} wrong")
    return num_wrong
