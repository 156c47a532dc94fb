"""Checks a layer's kernels against float64 and times them, at a real model's sizes.

    python benchmarks/micro.py kernels --tokens 1 8 64 256 --prefixes 512 4096 32768

There is a row per number of tokens fed and length of the prefix. A model of one layer (32 query and 8 key-value heads
of 128 by default) with random weights feeds a tree after a prefix, as decoding does: captured, with our kernels.
`error` is ||logits - reference|| / ||reference|| over all nodes, less their means; the reference is the same weights in
float64 through transformers' attention. `unfused` is the error of transformers' own layers in the same dtype, which is
due to rounding alone. The times are microseconds of one replay: of the whole pass, and (`--profile`) of each kernel of
ours in it by name, as torch's profiler sees them. The exit status is 1 if an error is above twice that of rounding
alone and above the tolerance of the self-check.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from common import Results
from models import free_memory
from transformers import AutoModelForCausalLM, LlamaConfig

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.differences import TOLERANCES
from lp_runtime.model.hf.types import CausalLM
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import choose_device, prepare_model
from studies.floor import drafted_tree, synchronize
from studies.profile import device_times

NUM_TIMES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--prefixes", nargs="+", type=int, default=[512, 4096, 32768])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--heads", nargs=2, type=int, default=[32, 8], metavar=("QUERY", "KEY"))
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--profile", action="store_true", help="also time each kernel at each size")


def one_layer(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Return a model of one layer with random weights, the same for every dtype."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.heads[0] * args.head_size,
        intermediate_size=args.intermediate,
        num_hidden_layers=1,
        num_attention_heads=args.heads[0],
        num_key_value_heads=args.heads[1],
        head_dim=args.head_size,
        max_position_embeddings=2 * max(args.prefixes) + 4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to(dtype).eval()


class Fed:
    """Model whose slot holds a prefix.

    Args:
        runner: the model.
        prefix: committed tokens.
        capacity: tokens that must fit after them.
    """

    def __init__(self, runner: ModelRunner, prefix: int, capacity: int):
        self._runner, self._slot = runner, CacheSlot()
        runner.begin(self._slot, prefix + capacity)
        runner.prefill(self._slot, [i * 7919 % runner.vocabulary_size for i in range(prefix)])

    def logits(self, tree: TokenTree) -> torch.Tensor:
        """Return [T, V] float32 logits of a tree, without committing it."""
        return self._runner.forward(StepInputs.whole(self._slot, tree), commit=False).logits

    def forget(self) -> None:
        """Empty the slot."""
        self._slot = CacheSlot()


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| of logits, less their means."""
    actual, expected = (each.double() - each.double().mean(-1, keepdim=True) for each in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()


def median_us(fed: Fed, tree: TokenTree, device: torch.device) -> float:
    """Return the median microseconds of a pass, from an idle device to an idle device."""
    times = []
    for _ in range(NUM_TIMES):
        synchronize(device)
        started = time.perf_counter()
        fed.logits(tree)
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


def rows_of(args: argparse.Namespace, name: str, prefix: int, device: torch.device) -> Iterator[dict]:
    """Yield a row for every number of tokens, all after one prefix, in one dtype."""
    dtype = getattr(torch, name)
    capacity = 2 * max(args.tokens)
    trees = [drafted_tree(tokens, args.vocabulary) for tokens in args.tokens]
    exact = Fed(ModelRunner(one_layer(args, torch.float64, device), 512), prefix, capacity)
    expected = [exact.logits(tree).cpu() for tree in trees]
    exact.forget()
    plain = Fed(ModelRunner(one_layer(args, dtype, device), 512), prefix, capacity)
    unfused = [error_of(plain.logits(tree).cpu(), logits) for tree, logits in zip(trees, expected, strict=True)]
    plain.forget()
    runner, _ = prepare_model(one_layer(args, dtype, device), RuntimeConfig(dtype=name), device)
    fed = Fed(runner, prefix, capacity)
    for tree, logits, rounding in zip(trees, expected, unfused, strict=True):
        error = error_of(fed.logits(tree).cpu(), logits)
        row = {"dtype": name, "tokens": len(tree), "prefix": prefix, "captured": str(runner.graphs is not None)}
        row |= {"error": error, "unfused": rounding, "us": median_us(fed, tree, device)}
        if args.profile:
            row |= {f"us of {kernel}": us for kernel, us in own_kernels(fed, tree, device).items()}
        yield row
    free_memory(device)


def own_kernels(fed: Fed, tree: TokenTree, device: torch.device) -> dict[str, float]:
    """Return the microseconds of each of our kernels in a pass, by name; empty if the profiler sees none."""
    times = device_times(lambda: fed.logits(tree), device)
    return {each.name.lstrip("_"): each.microseconds for each in times if each.name.startswith("_")}


def run(args: argparse.Namespace) -> int:
    """Measure every dtype and prefix; return 1 if an error is too large."""
    device = choose_device("auto", 0)
    results = Results("kernels", args.output, {"error": ".2e", "unfused": ".2e", "us": ".0f"})
    num_wrong = 0
    for name in args.dtypes:
        for prefix in args.prefixes:
            for row in rows_of(args, name, prefix, device):
                allowed = max(2 * row["unfused"], TOLERANCES[getattr(torch, name)])
                num_wrong += not row["error"] <= allowed
                results.add(row)
    results.finish(f"one layer, {args.heads[0]} and {args.heads[1]} heads of {args.head_size}, V={args.vocabulary}")
    return 1 if num_wrong else 0
