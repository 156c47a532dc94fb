"""lp-bench splits=auto: measures every split of the GPUs into replicas, and saves the speeds.

The splits are measured one after another, because the replicas of several do not fit into memory at the same time.
Letters: R replicas of P GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict, dataclass

from lp_runtime.bench.methods import Result, runtime_methods
from lp_runtime.bench.output import markdown_table, report
from lp_runtime.bench.prompts import encode_prompts
from lp_runtime.config.commands import BenchConfig
from lp_runtime.distributed.environment import started_by_torchrun
from lp_runtime.errors import ConfigError, LookaheadError, first_line
from lp_runtime.launchers.split import keep_speeds
from lp_runtime.runtime import LookaheadRuntime

HEADER = ("R x P", "S", "ms a step", "tokens/s")


@dataclass(frozen=True)
class SplitSpeed:
    replicas: int
    gpus_per_replica: int
    compression: float = 0.0  # S, new tokens per step
    step_ms: float = 0.0  # prefills excluded
    tokens_per_second: float = 0.0  # prefills included
    refusal: str = ""  # why the split was not measured; empty if it was

    def cells(self) -> list[str]:
        name = f"{self.replicas} x {self.gpus_per_replica}"
        if self.refusal:
            return [name, "", "", self.refusal]
        return [name, f"{self.compression:.2f}", f"{self.step_ms:.2f}", f"{self.tokens_per_second:.1f}"]


def measure_splits(config: BenchConfig) -> list[SplitSpeed]:
    """Measure every split of `gpus`, P ascending; print a table, save the speeds and write the report."""
    if started_by_torchrun():
        raise ConfigError("splits=auto: not under torchrun, which starts the processes of one split")
    speeds: list[SplitSpeed] = []
    reasons: list[LookaheadError] = []
    for num_gpus in (each for each in range(1, config.num_gpus + 1) if config.num_gpus % each == 0):
        replicas = config.num_gpus // num_gpus
        try:
            results = _decode(dataclasses.replace(config, splits=None, gpus_per_replica=num_gpus))
            speeds.append(_speed(replicas, num_gpus, results))
        except LookaheadError as error:
            reasons.append(error)
            speeds.append(SplitSpeed(replicas, num_gpus, refusal=first_line(error)))
        print(f"| {' | '.join(speeds[-1].cells())} |", file=sys.stderr, flush=True)
    measured = {each.gpus_per_replica: each.tokens_per_second for each in speeds if not each.refusal}
    if not measured:
        raise reasons[0]
    keep_speeds(config, measured)
    table = markdown_table(HEADER, [each.cells() for each in speeds])
    as_json = json.dumps([asdict(each) for each in speeds], indent=1)
    report(table, config.output, {"splits.md": f"{table}\n".encode(), "splits.json": f"{as_json}\n".encode()})
    return speeds


def _decode(config: BenchConfig) -> list[Result]:
    """Decode every prompt in every round with a runtime of one split."""
    with LookaheadRuntime.from_config(config) as runtime:
        prompts = [prompt.token_ids for prompt in encode_prompts(runtime, config)]
        decode = runtime_methods(config, runtime, ["default"])["default"]
        decode(prompts[0])  # warm-up: the first request compiles and measures
        return [decode(prompt) for _ in range(config.rounds) for prompt in prompts]


def _speed(replicas: int, gpus_per_replica: int, results: list[Result]) -> SplitSpeed:
    num_tokens, num_steps = sum(len(each.token_ids) for each in results), sum(each.num_steps for each in results)
    seconds = [min(each.seconds.values()) for each in results]
    decoding = sum(time - (each.prefill_seconds or 0.0) for time, each in zip(seconds, results, strict=True))
    step_ms = 1000 * decoding / max(1, num_steps - len(results))
    return SplitSpeed(replicas, gpus_per_replica, num_tokens / num_steps, step_ms, num_tokens / sum(seconds))
