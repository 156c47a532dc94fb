"""Kills replicas at random steps: is the output right, and how long does no token arrive?

    python benchmarks/resilience.py kills --prompts humaneval.jsonl:prompt --kills 100 --gpus 2 3 4 \\
        --how kill stop memory --backends shared gloo

Every request loses one replica, chosen at random, at a random step; greedy and sampled requests take turns. A replica
is lost by SIGKILL (kill), by SIGSTOP, after which it hangs (stop), or by memory that it cannot allocate (memory). With
--gpus-per-replica any shard may be lost, and its replica with it. The next request begins when the lost replica is
back. The exit status is 1 if any output differs from an undisturbed run. Replicas are spawned and run in float32. Step
sizes are fixed, so that nothing is measured at a start.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import psutil
from common import Results, Row, add_prompt_arguments, add_shards_argument, load_prompts, replica_processes

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig

FIXED = LookaheadConfig(7, 5, 7, prior="none")
WAYS = ("kill", "stop", "memory")
MIN_MEMORY_BYTES = 1 << 20  # a replica may still allocate this much, too little for a step
RESTART_TIMEOUT_SECONDS = 120.0  # a lost replica must be back by then


@dataclass(frozen=True)
class Decoded:
    """Output of one request.

    Attributes:
        token_ids: new tokens.
        waits: milliseconds between each delta and the next one.
        losses: number of replicas lost while it was decoded.
    """

    token_ids: list[int]
    waits: list[float]
    losses: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_shards_argument(parser)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--how", nargs="+", choices=WAYS, default=["kill"], help="ways to lose a replica")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="transports")


def sampling_of(number: int) -> SamplingConfig:
    """Return greedy settings for even requests, sampled ones for odd requests."""
    return SamplingConfig(temperature=0.8, seed=number) if number % 2 else SamplingConfig(temperature=0.0)


def requests_of_row(place: int, num_rows: int, num_kills: int) -> range:
    """Return the numbers of a row's requests, from 0 on, so that each row has greedy and sampled ones.

    The rows share the kills; the first ones have one more if they cannot be divided.
    """
    return range(len(range(place, num_kills, num_rows)))


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
    assert stream.generation is not None  # the stream has ended
    waits = [1e3 * (later - earlier) for earlier, later in zip(times, times[1:], strict=False)]
    return Decoded(stream.generation.token_ids, waits, stream.generation.losses)


def wait_for_all(runtime: LookaheadRuntime, lost: psutil.Process) -> None:
    """Wait until every replica is running and loaded again, and the lost process is gone."""
    deadline = time.monotonic() + RESTART_TIMEOUT_SECONDS
    num_processes = runtime.num_replicas * runtime.gpus_per_replica

    def are_all_there() -> bool:
        alive = replica_processes()  # includes a killed process until its loss is noticed
        return lost not in alive and len(alive) >= num_processes and runtime.num_ready == runtime.num_replicas

    while not are_all_there():
        time.sleep(0.05)
        if time.monotonic() > deadline:
            raise SystemExit(f"a lost replica was not back within {RESTART_TIMEOUT_SECONDS:g} s")


def run(args: argparse.Namespace) -> int:
    """Decode and kill; return 1 if any output differs."""
    prompts = [prompt.turns[0] for prompt in load_prompts(args)]
    model = ModelConfig(path=args.model)
    num_shards = args.gpus_per_replica
    config = RuntimeConfig(
        model, FIXED, gpus=num_shards, gpus_per_replica=num_shards, device=args.device, dtype="float32"
    )
    with LookaheadRuntime.from_config(config) as runtime:
        expected = [
            decode(runtime, prompts[number % len(prompts)], args.max_new_tokens, number)
            for number in requests_of_row(0, len(args.gpus), args.kills)
        ]
    results = Results("kills", args.output, dict.fromkeys(("median ms without a token", "worst", "ms a step"), ".0f"))
    num_wrong = 0
    for backend, how, gpus in itertools.product(args.backends, args.how, args.gpus):
        config.gpus, config.failure = gpus, FailureConfig(restarts=args.kills)
        config.launcher = LauncherConfig(backend=backend)
        row = lose_many(config, prompts, expected, how, args)
        num_wrong += cast(int, row["outputs that differ"])
        results.add({"backend": backend, "how": how, "replicas": gpus // num_shards, "shards": num_shards} | row)
    results.finish(f"{args.max_new_tokens} new tokens a request")
    return 1 if num_wrong else 0


def lose(process: psutil.Process, how: str) -> None:
    """Kill a replica's process, suspend it, or leave it without memory."""
    if how == "kill":
        process.kill()
    elif how == "stop":
        process.suspend()
    else:
        limit = process.memory_info().vms + MIN_MEMORY_BYTES
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))


def lose_many(
    config: RuntimeConfig, prompts: list[str], expected: list[Decoded], how: str, args: argparse.Namespace
) -> Row:
    """Decode requests that each lose a replica; return a row of the table."""
    rng = random.Random(args.seed)
    place, num_rows = args.gpus.index(config.gpus), len(args.gpus)
    numbers = requests_of_row(place, num_rows, args.kills)
    gaps, usual, wrong, losses = [], [], 0, 0
    with LookaheadRuntime.from_config(config) as runtime:
        for number in numbers:
            when = rng.randrange(max(1, len(expected[number].waits) - 1))
            victim = rng.choice(replica_processes())

            def on_delta(index: int, when: int = when, victim: psutil.Process = victim) -> None:
                if index == when:
                    lose(victim, how)

            decoded = decode(runtime, prompts[number % len(prompts)], args.max_new_tokens, number, on_delta)
            gaps.append(max(decoded.waits[when:], default=0.0))
            usual += decoded.waits[:when]
            wrong += decoded.token_ids != expected[number].token_ids
            losses += decoded.losses
            if victim.is_running():  # it found enough memory
                victim.kill()
            wait_for_all(runtime, victim)
    row: Row = {"losses": len(numbers), "noticed while decoding": losses, "outputs that differ": wrong}
    row |= {"median ms without a token": statistics.median(gaps), "worst": max(gaps)}
    return row | {"ms a step": statistics.median(usual) if usual else None}
