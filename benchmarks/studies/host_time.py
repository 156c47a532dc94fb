"""Measures host time that an accelerator cannot hide: from the end of a pass to the next launch.

    python benchmarks/micro.py host --prompts humaneval.jsonl:prompt --limit 6 --settings 7,5,7 15,5,15 30,5,30 auto
    python benchmarks/micro.py host --prompts humaneval.jsonl:prompt --limit 6 --settings 15,5,15 auto --gpus 1 2 4 8

Needs no accelerator. Every prompt is decoded once on this machine, and the samples of each step are kept. It is then
decoded again with a simulated device: a launch returns at once, and some milliseconds later the pass has ended and the
kept samples are available, also those of the other replicas. The first replica is timed. The host does the same work as
with a GPU: it writes the inputs of a pass of a fixed size, waits where it would wait, and merges the samples of all
replicas. Its caches keep its own data, which a CPU's forward pass would evict. Launching the graph, the collective and
copies are not included.

A pass of one token takes --device-ms; CURVE has the factors for more tokens, and `auto` sizes its steps by it. So that
both runs grow the same trees, both assume a host time of --host-us, plus --node-us for each node.

The figures are microseconds per step of one replica, median and 90th percentile over all steps, text decoding and
delivery included, for the drafter `full`, greedy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from common import GREEDY, Results, add_prompt_arguments, add_settings_argument, load_prompts, parse_setting

from lp_runtime.calibration.calibration import Measured
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import DEMO_MODEL, ModelConfig, RuntimeConfig
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.distributed.exchange import Exchange
from lp_runtime.distributed.transport.group import CPU, Group
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tokenizer import encode
from lp_runtime.replica.loading import ready_model
from lp_runtime.request.generation import GenerationStream
from lp_runtime.request.output import Event
from lp_runtime.request.request import Request
from lp_runtime.request.request_text import RequestText
from studies.replay import (
    AssumedCalibration,
    AssumedClocks,
    ReplayDevice,
    ReplayExchange,
    ReplayRunner,
    SettledEngine,
)
from studies.whole_tree import WholeTreeEngine

CURVE = {1: 1.0, 64: 1.11, 128: 1.26, 256: 2.1}  # relative to one token's time: the target for 7B parameters on an H200


@dataclass(frozen=True)
class Recorded:
    """Request that was decoded, with its output.

    Attributes:
        request: the request.
        token_ids: new tokens.
        steps: [T, width] samples of all replicas, by step, the prefill's first.
    """

    request: Request
    token_ids: list[int]
    steps: list[np.ndarray]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    add_prompt_arguments(parser)
    add_settings_argument(parser)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1], metavar="R", help="replicas")
    parser.add_argument("--device-ms", type=float, default=4.0, help="time of a pass of one token")
    parser.add_argument("--host-us", type=float, default=100.0, help="host time per step that `auto` assumes")
    parser.add_argument("--node-us", type=float, default=1.0, help="host time per node that `auto` assumes")


class HostBench:
    """A model and prompts.

    Attributes:
        prompts: token ids of every prompt.
    """

    def __init__(self, args: argparse.Namespace):
        config = ModelConfig(path=str(args.model or DEMO_MODEL))
        self._model: ModelRunner
        self._model, _ = ready_model(RuntimeConfig(model=config, device="cpu", dtype="float32"), CPU)
        self._tokenizer = load_tokenizer(config)
        self.prompts = [tuple(encode(self._tokenizer, prompt.turns[0])) for prompt in load_prompts(args)]
        self._args = args
        self._curve = {tokens: args.device_ms / 1000 * factor for tokens, factor in CURVE.items()}
        self._known = Measured()

    def measure(self, num_replicas: int, lookahead: LookaheadConfig) -> tuple[float, ReplayDevice]:
        """Decode all prompts with some settings.

        Args:
            num_replicas: R.
            lookahead: the settings.

        Returns:
            S over all prompts, and the device with its measurements.
        """
        calibration = AssumedCalibration(self._model, num_replicas, self._curve, self._known)
        recorded = self._record(num_replicas, calibration, lookahead)
        device = ReplayDevice(calibration.seconds)

        def make_exchange(group: Group, capacity: int, width: int) -> Exchange:
            return ReplayExchange(group, capacity, width, device, self._clocks(calibration))

        model = ReplayRunner(self._model, device)
        engine = SettledEngine(model, num_replicas, calibration, make_exchange)
        engine.prepare(lookahead)
        for number, one in enumerate(recorded):
            device.begin(one.steps)
            events = cast(Generator[Event, None, None], engine.run(one.request, make_sampler(model, one.request)))
            stream = GenerationStream(events, RequestText(one.request, self._tokenizer))
            assert [token for delta in stream for token in delta.token_ids] == one.token_ids
            if number == 0:  # warm-up
                device.gaps.clear()
                device.sizes.clear()
        timed = recorded[1:]
        return sum(len(one.token_ids) for one in timed) / sum(len(one.steps) for one in timed), device

    def _record(
        self, num_replicas: int, calibration: AssumedCalibration, lookahead: LookaheadConfig
    ) -> Sequence[Recorded]:
        """Decode all prompts on this machine, the first one twice: what the engine learns changes later trees."""
        engine = WholeTreeEngine(lambda: self._clocks(calibration), self._model, num_replicas, calibration)
        prompts = [self.prompts[0], *self.prompts]
        requests = [Request(prompt, lookahead, self._args.max_new_tokens, sampling=GREEDY) for prompt in prompts]
        for request in requests:
            for _ in engine.run(request):
                pass
        decoded = zip(requests, engine.decoded, strict=True)
        return [Recorded(request, each.decoder.state.new_tokens, each.steps) for request, each in decoded]

    def _clocks(self, calibration: AssumedCalibration) -> AssumedClocks:
        return AssumedClocks(calibration.seconds, self._args.host_us, self._args.node_us)


def run(args: argparse.Namespace) -> int:
    """Measure every setting on every number of replicas."""
    bench = HostBench(args)
    formats = {"tokens fed": ".0f", "nodes": ".0f", "not hidden, us": ".0f", "90th percentile": ".0f"}
    results = Results("host", args.output, formats)
    for num_replicas in args.gpus:
        for setting in args.settings:
            lookahead = parse_setting(setting)
            if lookahead.drafter != "full":
                raise SystemExit(f"--settings {setting}: must be of the drafter full")
            lookahead = replace(lookahead, draft_tables="request")  # so that both runs grow the same trees
            ratio, device = bench.measure(num_replicas, lookahead)
            microseconds = [1e6 * gap for gap in device.gaps]
            fed, nodes = (statistics.mean(each) for each in zip(*device.sizes, strict=True))
            row = {"(W, N, G)": f"({setting})", "replicas": num_replicas, "tokens fed": fed, "nodes": nodes, "S": ratio}
            row |= {"not hidden, us": statistics.median(microseconds)}
            results.add(row | {"90th percentile": statistics.quantiles(microseconds, n=10)[8]})
    results.finish(
        f"{len(bench.prompts)} prompts, {args.max_new_tokens} new tokens each, {args.device_ms:g} ms a token"
    )
    return 0
