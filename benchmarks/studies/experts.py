"""Mixture of experts with random weights: is it captured, how long are its steps, is its text right?

    python benchmarks/micro.py experts --model experts --dtype bfloat16 --tokens 1 8 64 --compile auto off
    python benchmarks/micro.py experts --layers experts qwen3_experts gpt_oss --tokens 1 8 64   experts alone, on a GPU

`micro.py floor --models experts qwen3_experts gpt_oss` compares steps with the time to read the experts' weights.

There is a row for each way to launch a pass and each number of tokens. `text` compares greedy decoding of the very
small mixture in float32 with transformers' `generate`; the exit status is 1 if they differ or a model is refused.

With --layers, a layer's experts alone are timed in bfloat16, captured, in microseconds: transformers' grouped product
and our kernels, for NUM_TABLES tables of equally likely choices in turn. `to read` is the time to read the weights of
the chosen experts, which are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Results, Row, generate_greedily, tokens_and_report
from models import free_memory, load_named, random_model, runner_of
from torch import nn

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ModelError, first_line
from lp_runtime.kernels.dispatch import why_no_kernels
from lp_runtime.model.modules.fused_experts import FusedExperts
from lp_runtime.replica.loading import choose_device, prepare_model
from lp_runtime.request.request import Request
from studies.floor import copy_bandwidth, measure

PROMPT = tuple(range(300, 340))
NUM_NEW_TOKENS = 48
NUM_TABLES = 8
MIXTURES = ("experts", "qwen3_experts", "gpt_oss", "small_experts")  # of models.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--model", default="small_experts", choices=MIXTURES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--compile", nargs="+", default=["auto", "off"], choices=["off", "auto"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=512, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", nargs="+", default=[], choices=MIXTURES)


def is_text_the_same(mode: str, device: torch.device) -> bool:
    """Return whether greedy decoding of the small mixture in float32 equals transformers' `generate`."""
    expected = generate_greedily(load_named("small_experts", "float32", device), PROMPT, NUM_NEW_TOKENS)
    config = RuntimeConfig(dtype="float32", compile=mode)
    model, _ = prepare_model(load_named("small_experts", "float32", device), config, device)
    lookahead = LookaheadConfig(W=7, N=5, G=7, prior="none")
    tokens, _ = tokens_and_report(Engine(model, Group.alone()).run(Request(PROMPT, lookahead, NUM_NEW_TOKENS)))
    return tokens == expected


def captured_microseconds(calls: Sequence[Callable[[], torch.Tensor]], rounds: int) -> float:
    """Return the median time of a call, of several that are captured together."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    times = []
    for _ in range(rounds):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * started.elapsed_time(ended) / len(outputs))
    return statistics.median(times)


@torch.inference_mode()
def measure_layer(name: str, sizes: Sequence[int], rounds: int, device: torch.device, bandwidth: float) -> list[Row]:
    """Time a layer's experts for some numbers of tokens.

    Args:
        name: a mixture of RANDOM.
        sizes: numbers of tokens.
        rounds: replays of each.
        device: the GPU.
        bandwidth: bytes per second.

    Returns:
        A row for each number of tokens.
    """
    model = random_model(name, "bfloat16", device, num_hidden_layers=1)
    block: Any = next(each for each in model.modules() if getattr(getattr(each, "down_proj", None), "ndim", 0) == 3)
    fused, num_experts = FusedExperts(block), len(block.down_proj)
    bytes_per_expert = sum(each[0].nbytes for each in block.parameters())
    num_chosen, width = model.config.num_experts_per_tok, model.config.hidden_size
    rows = []
    for size in sizes:
        states = torch.randn(size, width, device=device, dtype=torch.bfloat16)
        scores = torch.rand(size, num_chosen, device=device, dtype=torch.bfloat16)
        tables = [torch.rand(size, num_experts, device=device).topk(num_chosen).indices for _ in range(NUM_TABLES)]

        def times_of(experts: nn.Module, states=states, scores=scores, tables=tables) -> float:
            calls = [lambda table=table: experts(states, table, scores) for table in tables]
            return captured_microseconds(calls, rounds)

        num_read = statistics.mean(len(table.unique()) for table in tables)
        row: Row = {"model": name, "tokens": size, "to read": 1e6 * num_read * bytes_per_expert / bandwidth}
        rows.append(row | {"grouped": times_of(block), "ours": times_of(fused)})
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure every mode, or experts alone."""
    device = choose_device("auto", 0)
    if args.layers:
        if (reason := why_no_kernels(device)) is not None:
            raise SystemExit(f"--layers: needs the Triton kernels: {reason}")
        layers = Results("experts", args.output, dict.fromkeys(("to read", "grouped", "ours"), ".1f"))
        bandwidth = copy_bandwidth(device)
        for name in args.layers:
            for row in measure_layer(name, args.tokens, args.rounds, device, bandwidth):
                layers.add(row)
            free_memory(device)
        layers.finish(f"experts of one layer, bfloat16, us; copy bandwidth {bandwidth / 1e9:.0f} GB/s")
        return 0
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
