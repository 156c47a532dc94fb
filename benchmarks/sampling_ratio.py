"""Compression ratio when sampling, beside greedy decoding of the same prompts.

    python benchmarks/sampling_ratio.py --prompts humaneval.jsonl:prompt gsm8k.jsonl:question --settings 7,5,7 15,5,15

S = new tokens / steps over all prompts, the prefill included. Prompt i is sampled with seed i; every run's tokens are
compared with plain decoding (one token a step) of the same seed.
"""

from __future__ import annotations

import argparse
import sys

from common import add_arguments, load_prompts, machine, markdown, parse_setting, totals

from lp_runtime import LookaheadRuntime, SamplingConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import ModelConfig

SAMPLERS = {
    "greedy": {"temperature": 0},
    "temperature 1.0": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    prompts = load_prompts(args)
    rows, num_mismatches = [], 0
    with LookaheadRuntime(ModelConfig(path=args.model), launcher="local", device="cpu", dtype="float32") as runtime:
        for name, sampler in SAMPLERS.items():
            options = [{"eos": False, "sampling": SamplingConfig(**sampler, seed=seed)} for seed in range(len(prompts))]
            plain = [
                runtime.generate(prompt.value, args.max_new_tokens, lookahead=PLAIN, **option).token_ids
                for prompt, option in zip(prompts, options, strict=True)
            ]
            for setting in args.settings:
                runs = [
                    runtime.generate(prompt.value, args.max_new_tokens, lookahead=parse_setting(setting), **option)
                    for prompt, option in zip(prompts, options, strict=True)
                ]
                wrong = sum(run.token_ids != tokens for run, tokens in zip(runs, plain, strict=True))
                num_mismatches += wrong
                ratio, fed = totals(runs)
                rows.append([name, f"({setting})", len(prompts), wrong, f"{ratio:.3f}", f"{fed:.1f}"])
                print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}; {args.max_new_tokens} new tokens a prompt\n")
    print(markdown(["decoding", "(W, N, G)", "prompts", "mismatches", "S", "tokens fed a step"], rows))
    sys.exit(1 if num_mismatches else 0)


if __name__ == "__main__":
    main()
