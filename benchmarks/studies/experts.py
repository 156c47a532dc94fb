"""Mixture of experts with random weights: is it captured, how long are its steps, is its text right?

    python benchmarks/micro.py experts --model experts --dtype bfloat16 --tokens 1 8 64 --compile auto off

`micro.py floor --models experts qwen3_experts gpt_oss` compares steps with the time to read the experts' weights.

There is a row for each way to launch a pass and each number of tokens. `text` compares greedy decoding of the very
small mixture in float32 with transformers' `generate`; the exit status is 1 if they differ or a model is refused.
"""

from __future__ import annotations

import argparse

import torch
from common import Results, generate_greedily, tokens_and_report
from models import free_memory, load_named, runner_of

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ModelError, first_line
from lp_runtime.replica.loading import choose_device, prepare_model
from lp_runtime.request.request import Request
from studies.floor import measure

PROMPT = tuple(range(300, 340))
NUM_NEW_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--model", default="small_experts", choices=["experts", "small_experts"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--compile", nargs="+", default=["auto", "off"], choices=["off", "auto"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=512, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=20)


def is_text_the_same(mode: str, device: torch.device) -> bool:
    """Return whether greedy decoding of the small mixture in float32 equals transformers' `generate`."""
    expected = generate_greedily(load_named("small_experts", "float32", device), PROMPT, NUM_NEW_TOKENS)
    config = RuntimeConfig(dtype="float32", compile=mode)
    model, _ = prepare_model(load_named("small_experts", "float32", device), config, device)
    lookahead = LookaheadConfig(W=7, N=5, G=7, prior="none")
    tokens, _ = tokens_and_report(Engine(model, Group.alone()).run(Request(PROMPT, lookahead, NUM_NEW_TOKENS)))
    return tokens == expected


def run(args: argparse.Namespace) -> int:
    """Measure every mode."""
    device = choose_device("auto", 0)
    results = Results("experts", args.output)
    num_wrong = 0
    for mode in args.compile:
        try:
            text = "the same" if is_text_the_same(mode, device) else "differs"
            model = runner_of(args.model, RuntimeConfig(dtype=args.dtype, compile=mode), device)
        except ModelError as error:
            num_wrong += 1
            results.add({"compile": mode, "text": f"refused: {first_line(error)}".replace("|", "/")})
            continue
        num_wrong += text != "the same"
        captured = "yes" if model.graphs else "no"
        times = measure(model, args.tokens, args.context, args.rounds)
        for tokens, (step, issued) in times.items():
            row = {"compile": mode, "captured": captured, "text": text, "tokens": tokens}
            results.add(row | {"step ms": step, "issued ms": issued})
        del model
        free_memory(device)
    results.finish(f"{args.model}, {args.dtype}, {args.context} committed tokens")
    return 1 if num_wrong else 0
