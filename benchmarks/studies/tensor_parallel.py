"""Compares lookahead parallelism with transformers' tensor parallelism on the same ranks.

    torchrun --nproc-per-node 2 benchmarks/speed.py tensor_parallel --model DIR --prompts FILE:FIELD ... --limit 2

Decoding is greedy and continues past any end of text; the methods alternate prompt by prompt. `hf` is transformers'
greedy decoding on one rank while the others wait, `hf tensor parallel` splits the weights over all ranks
(`tp_plan="auto"`), `plain` and `default` are this runtime on all ranks. Figures are medians over prompts. In float32
the outputs must be equal; the table counts those that are not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from common import Results, add_prompt_arguments, decode_past_end, load_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from lp_runtime import LookaheadRuntime
from lp_runtime.bench.methods import HuggingFace
from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.model.loading.loader import DTYPES, quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser, limit=2)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)


def load(path: str, dtype: str, device: str, **options: Any) -> PreTrainedModel:
    """Load a model with transformers; `options` are those of `from_pretrained`."""
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **options)
        return model.to(device).eval()


def write(
    args: argparse.Namespace, seconds: dict[str, list[float]], outputs: dict[str, list[list[int]]], about: str
) -> None:
    """Show and write the results.

    Args:
        args: arguments of the study.
        seconds: by method, a value per prompt.
        outputs: new tokens by method and prompt.
        about: text above the table.
    """
    results = Results("tensor_parallel", args.output)
    for name, times in seconds.items():
        row = {"method": name, "tokens/s": statistics.median(args.max_new_tokens / each for each in times)}
        ratios = [plain / each for each, plain in zip(times, seconds["hf"], strict=True)]
        differ = sum(a != b for a, b in zip(outputs[name], outputs["hf"], strict=True))
        results.add(row | {"over hf on one rank": statistics.median(ratios), "outputs that differ": differ})
    results.finish(f"{about}, {args.max_new_tokens} new tokens a prompt, {args.dtype}")


def wait_for_all() -> None:
    """Wait for all ranks; transformers makes their group, unless there is only one rank."""
    if dist.is_initialized():
        dist.barrier()


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    """Measure every method on this rank's group; the leader shows the results."""
    with LookaheadRuntime(args.model, launcher="torchrun", dtype=args.dtype) as runtime:
        prompts = [
            runtime.tokenizer(prompt.value, add_special_tokens=False)["input_ids"] for prompt in load_prompts(args)
        ]
        path, device = runtime.config.model.location, runtime.info.device
        leads = runtime.is_leader
        split = HuggingFace(load(path, args.dtype, device, tp_plan="auto"), args.max_new_tokens)
        alone = HuggingFace(load(path, args.dtype, device), args.max_new_tokens) if leads else None

        def ours(prompt: list[int], lookahead: LookaheadConfig) -> list[int]:
            return decode_past_end(runtime, prompt, args.max_new_tokens, lookahead).token_ids

        methods = {
            "hf": lambda prompt: alone.decode(prompt).token_ids if alone else [],
            "hf tensor parallel": lambda prompt: split.decode(prompt).token_ids,
            "plain": lambda prompt: ours(prompt, PLAIN),
            "default": lambda prompt: ours(prompt, LookaheadConfig(draft_tables="request")),
        }
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        outputs: dict[str, list[list[int]]] = {name: [] for name in methods}
        for is_warm_up, prompt in [(True, prompts[0]), *((False, prompt) for prompt in prompts)]:
            for name, method in methods.items():
                wait_for_all()
                started = time.perf_counter()
                output = method(prompt)
                wait_for_all()
                if not is_warm_up:
                    seconds[name].append(time.perf_counter() - started)
                    outputs[name].append(output)
        if leads:
            write(args, seconds, outputs, f"{len(prompts)} prompts, {os.environ['WORLD_SIZE']} ranks")
    return 0
