"""Tokens per second of lookahead=auto beside one token a step and other drafters, by kind of prompt and temperature.

    python benchmarks/auto.py --prompts spec_bench.jsonl:turns --limit 480 --each 3 --temperatures 0 0.7 1.0

Every prompt is decoded with every setting, one after the other, in an order that turns from prompt to prompt; what is
printed are medians over a kind's prompts of the ratio to one token a step of the same prompt in the same round. Nothing
else must run on the machine. Exits with 1 if an output is not that of one token a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from common import machine, markdown

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig

SETTINGS = {
    "one token a step": PLAIN,
    "auto": LookaheadConfig(),
    "prompt lookup": LookaheadConfig(drafter="prompt_lookup"),
    "paper (15,5,15)": LookaheadConfig(W=15, N=5, G=15, drafter="paper"),
}


def read(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(kind, prompt): the first `each` of every kind; of a file without categories, its name is the kind."""
    chosen: dict[str, list[str]] = {}
    for source in args.prompts:
        path, _, field = source.rpartition(":")
        for line in Path(path).read_text().splitlines()[: args.limit]:
            row = json.loads(line)
            prompts = chosen.setdefault(row.get("category", Path(path).stem), [])
            if len(prompts) < args.each:
                prompts.append(row[field][0] if isinstance(row[field], list) else row[field])
    return [(kind, prompt) for kind, prompts in chosen.items() for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="directory or hub id; the demo model if not given")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE:FIELD")
    parser.add_argument("--limit", type=int, default=None, help="lines of each file to look at")
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    prompts = read(args)
    ratios: dict[tuple[float, str, str], list[float]] = {}
    fed: dict[tuple[float, str], list[float]] = {}
    num_wrong = 0
    options = {"launcher": "local", "device": args.device, "dtype": args.dtype, "gpus": args.gpus}
    with LookaheadRuntime(ModelConfig(path=args.model), **options) as runtime:
        for temperature in args.temperatures:
            names = list(SETTINGS)
            for number, (kind, prompt) in enumerate(prompts):
                sampling = SamplingConfig(temperature=temperature, seed=number if temperature else None)
                names.append(names.pop(0))
                runs = {
                    name: runtime.generate(
                        prompt, args.max_new_tokens, eos=False, lookahead=SETTINGS[name], sampling=sampling
                    )
                    for name in names
                }
                plain = runs["one token a step"]
                for name, run in runs.items():
                    num_wrong += run.token_ids != plain.token_ids
                    ratio = run.tokens_per_second / plain.tokens_per_second
                    ratios.setdefault((temperature, kind, name), []).append(ratio)
                fed.setdefault((temperature, kind), []).append(runs["auto"].step_tokens)
    rows = [
        [
            temperature,
            kind,
            *(f"{statistics.median(ratios[temperature, kind, name]):.2f}" for name in list(SETTINGS)[1:]),
            f"{min(ratios[temperature, kind, 'auto']):.2f}",
            f"{statistics.mean(of_auto):.1f}",
        ]
        for (temperature, kind), of_auto in fed.items()
    ]
    print(f"{len(prompts)} prompts, {args.max_new_tokens} new tokens each, {args.gpus} replica(s); {machine()}\n")
    header = ["temperature", "kind", *list(SETTINGS)[1:], "auto, worst prompt", "auto, tokens a step"]
    print(markdown(header, rows))
    print(f"\noutputs that differ: {num_wrong}")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
