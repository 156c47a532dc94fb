"""Replicas killed at random steps: is the output that of an undisturbed run, and how long does no token come?

    python benchmarks/resilience.py kills --prompts humaneval.jsonl:prompt --kills 100 --gpus 2 3 4

Every request loses one replica, SIGKILL, chosen at random, at a random step; greedy and sampled requests take turns.
The next request begins when the lost replica is back. The exit status is 1 if any output differs. Spawned replicas on
CPUs, float32; sizes of steps are given, so that nothing is measured at a start.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from common import Results, add_prompt_arguments, load_prompts, replica_processes

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import FailureConfig, ModelConfig, RuntimeConfig

FIXED = LookaheadConfig(7, 5, 7, prior="none")
RESTART_TIMEOUT_SECONDS = 120.0  # until a lost replica must be back


@dataclass(frozen=True)
class Decoded:
    """One request's output.

    Attributes:
        token_ids: new tokens.
        waits: milliseconds between a delta and the next one.
        losses: replicas that were lost while it was decoded.
    """

    token_ids: list[int]
    waits: list[float]
    losses: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)


def sampling_of(number: int) -> SamplingConfig:
    """Return greedy decoding and sampling in turns."""
    return SamplingConfig(temperature=0.8, seed=number) if number % 2 else SamplingConfig(temperature=0.0)


def decode(
    runtime: LookaheadRuntime,
    prompt: str,
    max_new_tokens: int,
    number: int,
    on_delta: Callable[[int], None] = lambda _: None,
) -> Decoded:
    """Decode request `number`; `on_delta` is called with the index of every delta."""
    stream = runtime.stream(prompt, max_new_tokens, eos=False, sampling=sampling_of(number))
    times = []
    for index, _ in enumerate(stream):
        times.append(time.perf_counter())
        on_delta(index)
    waits = [1e3 * (later - earlier) for earlier, later in zip(times, times[1:], strict=False)]
    return Decoded(stream.generation.token_ids, waits, stream.generation.losses)


def wait_for_all(runtime: LookaheadRuntime) -> None:
    """Wait until every replica runs and is loaded again."""
    deadline = time.monotonic() + RESTART_TIMEOUT_SECONDS
    while min(runtime.num_ready, len(replica_processes())) < runtime.num_replicas:
        time.sleep(0.05)
        if time.monotonic() > deadline:
            raise SystemExit(f"a lost replica was not back within {RESTART_TIMEOUT_SECONDS:g} s")


def run(args: argparse.Namespace) -> int:
    """Decode and kill; 1 if any output differs."""
    prompts = [prompt.value for prompt in load_prompts(args)]
    config = RuntimeConfig(model=ModelConfig(path=args.model), gpus=1, device="cpu", dtype="float32", lookahead=FIXED)
    with LookaheadRuntime.from_config(config) as runtime:
        expected = [
            decode(runtime, prompts[number % len(prompts)], args.max_new_tokens, number) for number in range(args.kills)
        ]
    rng = random.Random(args.seed)
    results = Results("kills", args.output, dict.fromkeys(("median ms without a token", "worst", "ms a step"), ".0f"))
    num_wrong = 0
    for place, gpus in enumerate(args.gpus):
        config.gpus, config.failure = gpus, FailureConfig(restarts=args.kills)
        numbers = range(place, args.kills, len(args.gpus))
        gaps, usual, wrong, losses = [], [], 0, 0
        with LookaheadRuntime.from_config(config) as runtime:
            for number in numbers:
                when, victim = rng.randrange(max(1, len(expected[number].waits) - 1)), rng.randrange(gpus)

                def kill(index: int, when: int = when, victim: int = victim) -> None:
                    if index == when:
                        replica_processes()[victim].kill()

                decoded = decode(runtime, prompts[number % len(prompts)], args.max_new_tokens, number, kill)
                gaps.append(max(decoded.waits[when:], default=0.0))
                usual += decoded.waits[:when]
                wrong += decoded.token_ids != expected[number].token_ids
                losses += decoded.losses
                wait_for_all(runtime)
        num_wrong += wrong
        row = {"replicas": gpus, "kills": len(numbers), "noticed while decoding": losses, "outputs that differ": wrong}
        row |= {"median ms without a token": statistics.median(gaps), "worst": max(gaps)}
        results.add(row | {"ms a step": statistics.median(usual) if usual else None})
    results.finish(f"{args.max_new_tokens} new tokens a request")
    return 1 if num_wrong else 0
