"""Replicas killed at random steps: is the output that of an undisturbed run, and how long does no token come?

    python benchmarks/kills.py --prompts humaneval.jsonl:prompt --kills 100 --gpus 2 3 4

Every request loses one replica, SIGKILL, drawn at random, at a random step; greedy and sampled requests take turns. The
next one begins when the lost replica is back. The exit status is 1 if any output differs. Spawned replicas on CPUs,
float32; sizes of steps are given, so that nothing is measured at a start.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable

from common import add_arguments, load_prompts, machine, markdown

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import FailureConfig, ModelConfig, RuntimeConfig

FIXED = LookaheadConfig(7, 5, 7, prior="none")
PATIENCE = 120.0  # seconds until a lost replica must be back


def sampling_of(number: int) -> SamplingConfig:
    """Greedy decoding and sampling in turns."""
    return SamplingConfig(temperature=0.8, seed=number) if number % 2 else SamplingConfig(temperature=0.0)


def decode(
    runtime: LookaheadRuntime, prompt: str, length: int, number: int, told: Callable[[int], None] = lambda _: None
) -> tuple[list[int], list[float], int]:
    """(token ids, when each piece came, replicas lost) of a request; `told` is called after every piece."""
    stream = runtime.stream(prompt, length, eos=False, sampling=sampling_of(number))
    times = [time.perf_counter()]
    for index, _ in enumerate(stream):
        times.append(time.perf_counter())
        told(index)
    return stream.generation.token_ids, times, stream.generation.losses


def wait_for_all(runtime: LookaheadRuntime) -> None:
    """Wait until the lost replica is loaded again."""
    deadline = time.monotonic() + PATIENCE
    while runtime.launcher.num_loading:
        time.sleep(0.05)
        if time.monotonic() > deadline:
            raise SystemExit(f"a lost replica was not back within {PATIENCE:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = [prompt.value for prompt in load_prompts(args)]
    config = RuntimeConfig(model=ModelConfig(path=args.model), gpus=1, device="cpu", dtype="float32", lookahead=FIXED)
    with LookaheadRuntime.from_config(config) as runtime:
        expected, num_pieces = [], []
        for number in range(args.kills):
            tokens, times, _ = decode(runtime, prompts[number % len(prompts)], args.max_new_tokens, number)
            expected.append(tokens)
            num_pieces.append(len(times) - 1)
    rng = random.Random(args.seed)
    rows, num_wrong = [], 0
    for place, gpus in enumerate(args.gpus):
        config.gpus, config.failure = gpus, FailureConfig(restarts=args.kills)
        numbers = range(place, args.kills, len(args.gpus))
        gaps, usual, wrong, lost = [], [], 0, 0
        with LookaheadRuntime.from_config(config) as runtime:
            for number in numbers:
                at, victim = rng.randrange(max(1, num_pieces[number] - 2)), rng.randrange(gpus)

                def kill(index: int, at: int = at, victim: int = victim) -> None:
                    if index == at:
                        os.kill(runtime.launcher._processes[victim].pid, signal.SIGKILL)

                prompt = prompts[number % len(prompts)]
                tokens, times, losses = decode(runtime, prompt, args.max_new_tokens, number, kill)
                waits = [1e3 * (b - a) for a, b in zip(times[1:], times[2:], strict=False)]
                gaps.append(max(waits[at:], default=0.0))
                usual += waits[:at]
                wrong += tokens != expected[number]
                lost += losses
                wait_for_all(runtime)
        num_wrong += wrong
        milliseconds = (statistics.median(gaps), max(gaps), statistics.median(usual))
        rows.append([gpus, len(numbers), lost, wrong, *(f"{each:.0f}" for each in milliseconds)])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}; {args.max_new_tokens} new tokens a request\n")
    header = ["replicas", "kills", "noticed while decoding", "outputs that differ"]
    print(markdown([*header, "ms without a token, median", "worst", "ms a step otherwise"], rows))
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
