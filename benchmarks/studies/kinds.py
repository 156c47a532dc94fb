"""Tokens per second of lookahead=auto beside one token a step and other drafters, by kind of prompt and temperature.

    python benchmarks/speed.py kinds --prompts spec_bench.jsonl:turns --limit 480 --each 3 --temperatures 0 0.7 1.0

Every prompt is decoded with every setting, one after the other, in an order that turns from prompt to prompt. The
columns are medians over a kind's prompts of the ratio to one token a step of the same prompt in the same round.
Nothing else must run on the machine. The exit status is 1 if an output is not that of one token a step.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field

from common import Results, add_prompt_arguments, load_prompts_by_kind

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig

SETTINGS = {
    "one token a step": PLAIN,
    "auto": LookaheadConfig(),
    "prompt lookup": LookaheadConfig(drafter="prompt_lookup"),
    "paper (15,5,15)": LookaheadConfig(W=15, N=5, G=15, drafter="paper"),
}


@dataclass
class Kind:
    """What was measured of the prompts of one kind at one temperature.

    Attributes:
        ratios: tokens per second over those of one token a step, by setting, a value a prompt.
        step_tokens: tokens fed a step by `auto`, a value a prompt.
    """

    ratios: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in list(SETTINGS)[1:]})
    step_tokens: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")


def run(args: argparse.Namespace) -> int:
    """Measure every kind at every temperature; 1 if any output differs."""
    prompts = load_prompts_by_kind(args)
    results = Results("kinds", args.output, {"auto, step tokens": ".1f"})
    num_wrong = 0
    options = {"launcher": "local", "device": args.device, "dtype": args.dtype, "gpus": args.gpus}
    with LookaheadRuntime(ModelConfig(path=args.model), **options) as runtime:
        for temperature in args.temperatures:
            names = list(SETTINGS)
            kinds = {kind: Kind() for kind, _ in prompts}
            for number, (kind, prompt) in enumerate(prompts):
                sampling = SamplingConfig(temperature=temperature, seed=number if temperature else None)
                names.append(names.pop(0))
                generations = {
                    name: runtime.generate(
                        prompt, args.max_new_tokens, eos=False, lookahead=SETTINGS[name], sampling=sampling
                    )
                    for name in names
                }
                plain = generations["one token a step"]
                num_wrong += sum(each.token_ids != plain.token_ids for each in generations.values())
                for name, ratios in kinds[kind].ratios.items():
                    ratios.append(generations[name].tokens_per_second / plain.tokens_per_second)
                kinds[kind].step_tokens.append(generations["auto"].step_tokens)
            for kind, measured in kinds.items():
                row = {"temperature": temperature, "kind": kind}
                row |= {name: statistics.median(ratios) for name, ratios in measured.ratios.items()}
                row |= {"auto, worst prompt": min(measured.ratios["auto"])}
                results.add(row | {"auto, step tokens": statistics.mean(measured.step_tokens)})
    about = f"{len(prompts)} prompts, {args.max_new_tokens} new tokens each, {args.gpus} replica(s)"
    results.finish(f"{about}, outputs that differ: {num_wrong}")
    return 1 if num_wrong else 0
