"""Where a step's time goes: forward, exchange, everything else; by setting and number of replicas.

    python benchmarks/step_time.py --prompts humaneval.jsonl:prompt --limit 10 --gpus 1 2

Milliseconds a step, medians over the prompts, of rank 0; the prefill's step is left out. "exchange" includes waiting
for slower replicas; "else" is proposing, partitioning and advancing. Runs alternate between the settings.
"""

from __future__ import annotations

import argparse
import statistics

from common import add_arguments, load_prompts, machine, markdown, parse_setting

from lp_runtime import Generation, LookaheadRuntime
from lp_runtime.config.settings import ModelConfig


def breakdown(runs: list[Generation]) -> list[str]:
    """Median milliseconds a step of forward, exchange, else and all, and the share of else."""
    steps = [run.steps - 1 for run in runs]
    parts = [
        [1000 * getattr(run.times, part) / n for run, n in zip(runs, steps, strict=True)]
        for part in ("forward", "exchange", "other")
    ]
    totals = [sum(times) for times in zip(*parts, strict=True)]
    share = [other / total for other, total in zip(parts[2], totals, strict=True)]
    medians = [statistics.median(values) for values in (*parts, totals)]
    return [*(f"{value:.2f}" for value in medians), f"{100 * statistics.median(share):.1f}%"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    prompts = load_prompts(args)
    rows = []
    for gpus in args.gpus:
        with LookaheadRuntime(
            ModelConfig(path=args.model), gpus=gpus, launcher="local", device=args.device, dtype=args.dtype
        ) as runtime:
            runs: dict[str, list[Generation]] = {setting: [] for setting in args.settings}
            for prompt in prompts:
                for setting in args.settings:
                    lookahead = parse_setting(setting)
                    runs[setting].append(
                        runtime.generate(prompt.value, args.max_new_tokens, eos=False, lookahead=lookahead)
                    )
            for setting, done in runs.items():
                fed = statistics.mean(run.step_tokens for run in done)
                rate = statistics.median(run.tokens_per_second for run in done)
                bytes_sent = done[0].exchange_bytes
                rows.append([gpus, f"({setting})", f"{fed:.1f}", *breakdown(done), bytes_sent, f"{rate:.0f}"])
    print(f"{machine()}; {len(prompts)} prompts, {args.max_new_tokens} new tokens each\n")
    header = ["replicas", "(W, N, G)", "tokens fed a step", "forward ms", "exchange ms", "else ms", "step ms"]
    print(markdown([*header, "else", "bytes a step", "tokens/s"], rows))


if __name__ == "__main__":
    main()
