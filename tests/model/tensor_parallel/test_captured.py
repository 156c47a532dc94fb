"""Captured passes on several GPUs: followers capture and replay the same passes as shard 0."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.batches import decode_alone
from support.shards import run_shards
from support.simulated_gpu import Graph
from support.simulated_shards import CPU, CUDA, SIZES, gpu_of_a_shard

from lp_runtime.calibration.calibration import Calibration, Measured, StepMeasurement
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import ShardError
from lp_runtime.model.checks import self_check
from lp_runtime.model.forward.cuda_graph import FixedPass, PassSet, PassSize
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import ready_follower, ready_model
from lp_runtime.request.request import Request

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
PROMPT = tuple(range(300, 312))
FIXED = LookaheadConfig(5, 4, 5, prior="none")  # computing a prior takes seconds for each engine
REQUESTS = {
    "greedy": Request(PROMPT, FIXED, 24),
    "paper": Request(PROMPT[1:], LookaheadConfig(5, 4, 5, drafter="paper"), 16),
    "sampled": Request(PROMPT[2:], FIXED, 12, sampling=SamplingConfig(temperature=0.8, seed=5)),
    "cut": Request(PROMPT[3:], FIXED, 12, sampling=SamplingConfig(temperature=0.8, top_p=0.9, seed=5)),
    "logprobs": Request(PROMPT[4:], FIXED, 12, logprobs=True),
}
ONE_STEP = {"copy_": 1, "graph": 1}  # all launches of a greedy step on a GPU: copy the inputs, replay the pass
POINTS = {"tokens": [1, 8, 32], "nanoseconds": [1_000_000, 1_050_000, 1_200_000], "num_padded": 0, "harvest_ns": 0}
POINTS["prefix_ns"] = [0, 0]


def follow(place: ShardPlace, config: RuntimeConfig) -> tuple[int, list[dict]]:
    """Run a follower; return the number of captured graphs, and the launches of each announced step."""
    launches = []
    with gpu_of_a_shard() as gpu:
        follower = ready_follower(config, CUDA, place)
        with pytest.raises(ShardError):
            for message in follower.messages():
                launches.append({})
                if message == "step":
                    gpu.launches.clear()
                else:
                    launches[-1] = dict(gpu.launches)
        return len(Graph.captured), launches


def lead(place: ShardPlace, config: RuntimeConfig, requests: dict[str, Request]) -> tuple[int, dict, list, set]:
    """Run shard 0 with some requests.

    Return the number of captured graphs, the outputs, the launches of each step of the first request, and the functions
    that waited for the GPU.
    """
    launches = []
    with gpu_of_a_shard() as gpu:
        model, _ = ready_model(config, CUDA, place=place)
        assert model.leading is not None and model.graphs is not None and model.graphs.capture
        group, num_captures = Group.alone(), len(Graph.captured)
        known = Measured(StepMeasurement(**{name: np.array(values) for name, values in POINTS.items()}))
        loop, outputs, waits = Engine(model, group, Calibration(model, group, None, known)), {}, set()
        for name, request in requests.items():
            loop.prepare(request.lookahead)
            gpu.waits.clear()
            outputs[name] = [token for each in list(loop.run(request))[:-1] for token in each.token_ids]
            waits |= set(gpu.waits) - {"hf_settings.py: build_processors"}  # once per request

        def observe(*args: object) -> None:
            launches.append(dict(gpu.launches))
            model.leading.tell("launched")
            model.leading.tell("step")
            gpu.launches.clear()

        list(loop.run(next(iter(requests.values())), observe=observe))
        assert len(Graph.captured) == num_captures, "all was captured at start"
        model.leading.close()
        return num_captures, outputs, launches, waits


def play(place: ShardPlace, config: RuntimeConfig, requests: dict[str, Request]) -> object:
    return lead(place, config, requests) if place.is_leader else follow(place, config)


@pytest.mark.slow
@pytest.mark.parametrize("exactness", ["fast", "strict"])
def test_captured_shards_match_one_gpu_and_launch_one_graph_per_step(exactness):
    config = RuntimeConfig(dtype="float32", exactness=exactness, strict_tokens=SIZES[-1])
    requests = REQUESTS if exactness == "fast" else {"greedy": REQUESTS["greedy"]}
    (num_captures, outputs, launches, waits), (num_followed, followed) = run_shards(play, 2, config, requests)
    whole = ModelRunner(load_model(ModelConfig(), CPU, "float32"), 512, own_attention=True)
    assert outputs == {name: decode_alone(whole, request)[0] for name, request in requests.items()}
    assert num_captures == num_followed == (1 if exactness == "strict" else 2 * len(SIZES) - 1)
    assert waits == {"exchange.py: finish"}
    assert len(launches) > 4 and all(step == ONE_STEP for step in launches[1:])
    steps = [each for each in followed if each]
    assert len(steps) == len(launches) and all(step == ONE_STEP for step in steps[1:])


def fail_everywhere(passes: PassSet, one: FixedPass) -> None:
    raise RuntimeError("a layer that waits")


def fail_on_the_follower(place: ShardPlace) -> Callable[[PassSet, PassSize], None]:
    make = PassSet.make

    def fail(passes: PassSet, size: PassSize) -> None:
        make(passes, size)
        if not place.is_leader:
            raise torch.OutOfMemoryError("no memory for this pass")

    return fail


def decode_without_graphs(place: ShardPlace, config: RuntimeConfig, where: str) -> object:
    with gpu_of_a_shard(), pytest.MonkeyPatch.context() as patch:
        if where == "everywhere":
            patch.setattr(PassSet, "run_pass", fail_everywhere)
        else:
            patch.setattr(PassSet, "make", fail_on_the_follower(place))
        if not place.is_leader:
            with pytest.raises(ShardError):
                for _ in ready_follower(config, CUDA, place).messages():
                    pass
            return None
        with pytest.MonkeyPatch.context() as patch_log:
            warnings: list[str] = []
            patch_log.setattr(self_check.log, "warning", lambda text, *values: warnings.append(text % values))
            model, _ = ready_model(config, CUDA, place=place)
        assert model.graphs is None
        tokens = decode_alone(model, REQUESTS["greedy"])[0]
        model.leading.close()
        return warnings, tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        pytest.param("everywhere", "a layer that waits", marks=pytest.mark.slow),
        ("follower", "it has failed on another GPU"),
    ],
)
def test_failed_capture_falls_back_to_uncaptured_passes(where, reason):
    config = RuntimeConfig(dtype="float32")
    (warnings, tokens), _ = run_shards(decode_without_graphs, 2, config, where)
    assert any(reason in each and "going on with compile=off" in each for each in warnings)
    whole = ModelRunner(load_model(ModelConfig(), CPU, "float32"), 512, own_attention=True)
    assert tokens == decode_alone(whole, REQUESTS["greedy"])[0]
