"""Compares a step with its floor: the time to read the model's weights once.

    python benchmarks/micro.py floor --models DIR ... --tokens 1 64 128 --compile off auto --dtype bfloat16
    python benchmarks/micro.py floor --models 7b 13b 34b --dtype bfloat16   the demo model inflated, in memory
    python benchmarks/micro.py floor --models windows --fusing auto off     with and without fused blocks

    python benchmarks/micro.py floor --models experts qwen3_experts gpt_oss --fusing auto off   mixtures of experts

The floor is weight bytes / copy bandwidth. The bandwidth is that of a large copy on the device, counting bytes read and
written. A step does the work of decoding: copy inputs to the device, run the forward pass, and bring successors and
top-k candidates back to the host. Figures are medians of --rounds, which alternate between the sizes. `issued ms` is
the time until the host has issued all work to the device: the device hides the host's time as long as that is shorter
than the step. Weights that packing keeps outside of parameters are counted by their shapes. With --sums, the passes
contain each layer's two sums over the GPUs of a replica, on one GPU over NCCL (gloo on a CPU): the additional launches
of captured passes of several GPUs. The exit status is 1 if a model could not be measured.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common import Results, Row
from models import free_memory, load_named

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.process_group import new_segment_name
from lp_runtime.distributed.reducers import CollectiveReducer
from lp_runtime.distributed.shards import ShardPlace, shard_group
from lp_runtime.lookahead.top_k import K
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.types import CausalLM
from lp_runtime.model.modules.packed_linear import PackedLinear
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tensor_parallel.layers import RowwiseLinear
from lp_runtime.replica.loading import choose_device, prepare_model
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler

NUM_WARM_UPS = 4  # rounds: the first of a size compiles and captures
NUM_COPIES = 10  # the fastest counts
COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # larger than any cache
SUMMED = ("o_proj", "down_proj")
SUM_SECONDS = 60.0  # timeout for forming the group of one
BRANCH = 8  # tokens per branch under the root, about as in drafted trees


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--models", nargs="+", default=["demo"], help="directories, or names of models.py")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 128])
    parser.add_argument("--compile", nargs="+", default=["auto"], choices=["off", "auto"])
    parser.add_argument(
        "--fusing", nargs="+", default=["auto"], choices=["auto", "off"], help="the setting model.fusing"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=512, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--sums", action="store_true", help="sum each layer's outputs as a replica of several GPUs does"
    )
    parser.add_argument("--copy-mib", type=int, default=None, help="size of the copy; larger than any cache by default")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Return the bytes per second, read and written, of the fastest of several large copies.

    Args:
        device: where the copy is made.
        num_bytes: size of the copy; None for more than any cache holds.
    """
    source = torch.ones(num_bytes or COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(NUM_COPIES):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * source.numel() / (time.perf_counter() - started))
    return best


def weight_bytes(model: CausalLM, num_tokens: int) -> float:
    """Return the bytes that a step reads.

    All weights count, tied ones once, except for an embedding that is only looked up. Of a mixture of experts, those
    count that some token chooses, on average if all choices are equally likely.
    """
    text = model.config.get_text_config()
    shares: dict[int, float] = {}
    for module in model.modules():
        down: Any = getattr(module, "down_proj", None)
        if getattr(down, "ndim", 0) == 3:
            share = 1 - (1 - text.num_experts_per_tok / len(down)) ** num_tokens
            shares |= {id(weight): share for weight in module.parameters(recurse=False)}
    seen = {id(each): each.numel() * each.element_size() * shares.get(id(each), 1) for each in model.parameters()}
    embedding: Any = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embedding.weight is not getattr(head, "weight", None):
        seen.pop(id(embedding.weight), None)
    packed = [each for each in model.modules() if isinstance(each, PackedLinear)]
    return sum(seen.values()) + sum(each.weight.shape.numel() * each.weight.dtype.itemsize for each in packed)


def drafted_tree(size: int, vocabulary_size: int) -> TokenTree:
    """Return a tree of `size` nodes: branches of 8 tokens under the root."""
    places = np.arange(size)
    parents = np.where(places % BRANCH == 1, 0, places - 1)
    depths = np.where(places > 0, (places - 1) % BRANCH + 1, 0)
    return TokenTree.from_arrays(places % vocabulary_size, parents, depths, places, 0, max_depth=BRANCH)


def measure(
    model: ModelRunner, sizes: Sequence[int], num_committed: int, rounds: int
) -> dict[int, tuple[float, float]]:
    """Time steps of trees, alternating between the sizes.

    Args:
        model: model to time.
        sizes: numbers of tokens of a step.
        num_committed: tokens in the KV cache before the first step.
        rounds: steps of each size.

    Returns:
        Median milliseconds of the step and of the host's issuing, by the step's number of tokens.
    """
    sampler = Sampler(TreeProcessors([], model.device), None, num_top_k=K)
    text = [i % model.vocabulary_size for i in range(num_committed)]
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    with model.slots.borrowed() as slot:
        model.begin(slot, num_committed + (rounds + NUM_WARM_UPS) * len(sizes) + max(sizes))
        model.prefill(slot, text)
        for number in range(rounds + NUM_WARM_UPS):
            for size in sizes:
                tree = drafted_tree(size, model.vocabulary_size)
                synchronize(model.device)
                started = time.perf_counter()
                logits = model.forward(StepInputs.whole(slot, tree))
                values, _ = sampler.sample(logits, tree, range(size), text)
                issued = time.perf_counter()
                values.cpu()
                ended = time.perf_counter()
                if number >= NUM_WARM_UPS:
                    times[size].append((1e3 * (ended - started), 1e3 * (issued - started)))
    return {
        size: (statistics.median(step for step, _ in seen), statistics.median(issued for _, issued in seen))
        for size, seen in times.items()
    }


def add_sums(model: torch.nn.Module, reducer: CollectiveReducer) -> None:
    """Make every layer's last projections sum their outputs over a replica's GPUs (here only one)."""
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in SUMMED and isinstance(module, torch.nn.Linear):
            setattr(model.get_submodule(parent), last, RowwiseLinear(module, reducer))


def lone_reducer(device: torch.device) -> CollectiveReducer:
    """Return a reducer over one GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = shard_group(ShardPlace(segment=new_segment_name()), backend, SUM_SECONDS)
    return CollectiveReducer(group, 1, can_capture=backend == "nccl")


def measure_model(
    args: argparse.Namespace, name: str, mode: str, fusing: str, device: torch.device, bandwidth: float
) -> list[Row]:
    """Measure one model with one way to launch a pass.

    Args:
        args: arguments of the study.
        name: as in `load_named`.
        mode: the setting `compile`.
        fusing: the setting `model.fusing`.
        device: where the model runs.
        bandwidth: bytes per second.

    Returns:
        One row of results per number of tokens.
    """
    path = name if "/" in name else None
    config = RuntimeConfig(model=ModelConfig(path=path, fusing=fusing), dtype=args.dtype, compile=mode)
    loaded = load_named(name, args.dtype, device)
    if args.sums:
        add_sums(loaded, lone_reducer(device))
    model, _ = prepare_model(loaded, config, device)
    times = measure(model, args.tokens, args.context, args.rounds)
    rows = []
    for tokens, (step, issued) in times.items():
        row: Row = {"model": name, "compile": mode if model.graphs else "off", "fusing": fusing, "tokens": tokens}
        size = weight_bytes(model.model, tokens)
        floor = 1e3 * size / bandwidth
        row |= {"sums": "yes" if args.sums else "no"}
        row |= {"GB": size / 1e9, "floor ms": floor, "step ms": step, "over floor": step / floor}
        rows.append(row | {"over the first": step / times[args.tokens[0]][0], "issued ms": issued})
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure every model in every mode; return 1 if one could not be measured."""
    device = choose_device("auto", 0)
    bandwidth = copy_bandwidth(device, None if args.copy_mib is None else args.copy_mib << 20)
    results = Results("floor", args.output)
    failed = []
    for name, mode, fusing in itertools.product(args.models, args.compile, args.fusing):
        try:
            for row in measure_model(args, name, mode, fusing, device, bandwidth):
                results.add(row)
        except Exception:  # a compiler's, or out of memory: measure the other models
            traceback.print_exc()
            failed.append(f"{name} {mode}")
        free_memory(device)
    results.finish(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s, {args.context} committed tokens, dtype={args.dtype}")
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
