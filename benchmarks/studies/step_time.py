"""Splits a step's time into forward pass, exchange and the rest; by setting and number of replicas.

    python benchmarks/micro.py step --prompts humaneval.jsonl:prompt --limit 10 --gpus 1 2

Figures are milliseconds per step of rank 0, medians over the prompts, without the prefill's step. `exchange` includes
waiting for slower replicas; `else` is proposing, partitioning and advancing. Runs alternate between the settings.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from common import Results, add_prompt_arguments, add_settings_argument, decode_past_end, load_prompts, parse_setting

from lp_runtime import Generation, LookaheadRuntime
from lp_runtime.config.settings import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_settings_argument(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")


def breakdown(generations: Sequence[Generation]) -> dict[str, float]:
    """Return the median milliseconds per step of forward, exchange, else and all, and else's percentage."""
    parts = [
        [1000 * getattr(each.times, part) / (each.steps - 1) for each in generations]
        for part in ("forward", "exchange", "other")
    ]
    steps = [sum(times) for times in zip(*parts, strict=True)]
    percentages = [100 * other / step for other, step in zip(parts[2], steps, strict=True)]
    names = ("forward ms", "exchange ms", "else ms", "step ms", "else %")
    return {name: statistics.median(each) for name, each in zip(names, (*parts, steps, percentages), strict=True)}


def run(args: argparse.Namespace) -> int:
    """Measure every setting on every number of replicas."""
    prompts = load_prompts(args)
    results = Results("step", args.output, {"step tokens": ".1f", "else %": ".1f", "tokens/s": ".0f"})
    for gpus in args.gpus:
        with LookaheadRuntime(
            ModelConfig(path=args.model), gpus=gpus, launcher="local", device=args.device, dtype=args.dtype
        ) as runtime:
            generations: dict[str, list[Generation]] = {setting: [] for setting in args.settings}
            for prompt in prompts:
                for setting, done in generations.items():
                    lookahead = parse_setting(setting)
                    done.append(decode_past_end(runtime, prompt.value, args.max_new_tokens, lookahead))
        for setting, done in generations.items():
            row = {"replicas": gpus, "(W, N, G)": f"({setting})"}
            row |= {"step tokens": statistics.mean(each.step_tokens for each in done), **breakdown(done)}
            row |= {"bytes a step": done[0].exchange_bytes}
            results.add(row | {"tokens/s": statistics.median(each.tokens_per_second for each in done)})
    results.finish(f"{len(prompts)} prompts, {args.max_new_tokens} new tokens each")
    return 0
