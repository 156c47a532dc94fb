"""Tests of replicas of several shards: spawned processes that each hold a slice of every layer."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import reference
from support.gate import Gate
from support.processes import own_replicas, wait_until
from support.thinned import thinned

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import FailureConfig, ModelConfig, RuntimeConfig
from lp_runtime.distributed.process_group import new_segment_name
from lp_runtime.distributed.shards import FOLDER
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.launchers import spawn
from lp_runtime.scheduler.scheduler import Scheduler

FIXED = LookaheadConfig(W=5, N=3, G=5, draft_tables="request")
LENGTH = 16


def start(model_dir: Path, gpus: int, num_shards: int, **settings) -> LookaheadRuntime:
    config = RuntimeConfig(
        ModelConfig(str(model_dir)), gpus=gpus, gpus_per_replica=num_shards, device="cpu", dtype="float32",
        failure=FailureConfig(timeout=60.0), **{"lookahead": FIXED} | settings,
    )  # fmt: skip
    return LookaheadRuntime.from_config(config)


@pytest.fixture(scope="module")
def expected(small_demo_dir) -> list[list[int]]:
    return reference.greedy(small_demo_dir, max_new_tokens=LENGTH)


@pytest.fixture(scope="module")
def shared_runtime(small_demo_dir):
    """Yield a runtime with two replicas of two shards, which tests may kill."""
    with start(small_demo_dir, 4, 2) as runtime:
        yield runtime


@pytest.fixture
def runtime(shared_runtime):
    wait_until(lambda: shared_runtime.num_ready == 2)
    return shared_runtime


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that replicas started in the context leave neither processes nor shared-memory files."""
    before, names = own_replicas(), []

    def named() -> str:
        names.append(new_segment_name())
        return names[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "new_segment_name", named)
        yield
    assert own_replicas() == before
    assert names and not [path for name in names for path in FOLDER.glob(f"{name}*")]


@pytest.fixture(scope="module")
def sampled(small_demo_dir) -> list[int]:
    """Return sampled tokens of one replica of two shards, whose step sizes depend on measurements.

    The replica supports batches.
    """
    lookahead = LookaheadConfig(draft_tables="request")
    with nothing_left(), start(small_demo_dir, 2, 2, lookahead=lookahead) as runtime:
        assert (runtime.num_replicas, runtime.info.supports_batching) == (1, True)
        out = runtime.generate(reference.PROMPTS[1], LENGTH, eos=False, sampling=reference.SAMPLING)
    return out.token_ids


def test_greedy_output_matches_transformers_generate(runtime, expected):
    assert runtime.num_replicas == 2
    outs = [runtime.generate(prompt, LENGTH, eos=False) for prompt in reference.PROMPTS]
    assert [out.token_ids for out in outs] == expected
    assert any(out.steps < LENGTH for out in outs)


@pytest.mark.slow
def test_sampling_does_not_depend_on_the_number_of_replicas(runtime, sampled):
    out = runtime.generate(reference.PROMPTS[1], LENGTH, eos=False, sampling=reference.SAMPLING)
    assert out.token_ids == sampled


@pytest.mark.parametrize("victim", thinned(4, range(4)))
def test_lost_shard_restarts_only_its_replica(runtime, expected, victim, tmp_path):
    """A shard of either replica is killed while a request is decoded."""
    processes = dict(runtime.launcher.host.processes)
    num_prompt = len(runtime.request(reference.PROMPTS[1], LENGTH).prompt_ids)
    gate = Gate(tmp_path, num_prompt)
    stream = runtime.stream(reference.PROMPTS[1], LENGTH, eos=False, processors=[gate])
    for number, _ in enumerate(stream):
        if number == 0:
            gate.wait_until_held()
            os.kill(processes[victim].pid, signal.SIGKILL)
            gate.open()
    assert stream.generation.token_ids == expected[1]
    assert stream.generation.losses == 1
    wait_until(lambda: runtime.num_ready == 2)
    changed = [
        number for number, process in runtime.launcher.host.processes.items() if process is not processes[number]
    ]
    assert changed == [2 * (victim // 2), 2 * (victim // 2) + 1]
    assert all(processes[number].wait() is not None for number in changed)
    assert runtime.generate(reference.PROMPTS[1], LENGTH, eos=False).token_ids == expected[1]


def test_closing_a_stream_ends_its_request(runtime, expected):
    stream = runtime.stream(reference.PROMPTS[1], 2000, eos=False)
    for _ in itertools.islice(stream, 3):
        pass
    stream.close()
    assert runtime.generate(reference.PROMPTS[2], LENGTH, eos=False).token_ids == expected[2]


def test_submit_accepts_only_gpus_of_whole_replicas(runtime, expected):
    with Scheduler(runtime, policy="throughput") as scheduler:
        with pytest.raises(ConfigError, match="gpus=3: must be a multiple of gpus_per_replica=2"):
            scheduler.submit(runtime.request(reference.PROMPTS[0], LENGTH, eos=False), gpus=3)
        with pytest.raises(ConfigError, match="gpus=6: must be at most 4, the number of GPUs"):
            scheduler.submit(runtime.request(reference.PROMPTS[0], LENGTH, eos=False), gpus=6)
        jobs = [scheduler.submit(runtime.request(prompt, LENGTH, eos=False), gpus=2) for prompt in reference.PROMPTS]
        outs = [[token for delta in job for token in delta.token_ids] for job in jobs]
    assert outs == expected


@pytest.mark.slow
def test_strict_output_does_not_depend_on_the_number_of_replicas(tiny_model_dir):
    options = {"exactness": "strict", "strict_tokens": 16}
    outs = []
    for gpus in (2, 4):
        with start(tiny_model_dir, gpus, 2, **options) as runtime:
            out = runtime.generate(
                [1, 2, 3], 24, eos=False, sampling=SamplingConfig(temperature=1.0, seed=5), logprobs=True
            )
            outs.append((out.token_ids, out.logprobs))
    assert outs[0] == outs[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 3}, "gpus=3: must be a multiple of gpus_per_replica=2"),
        ({"gpus": 1}, "gpus=1: must be a multiple of gpus_per_replica=2"),
        ({"gpus": 2, "model": {"device_map": "auto"}}, "model.device_map=auto: only with gpus_per_replica=1"),
        ({"gpus_per_replica": 0}, "gpus_per_replica=0: must be auto, fastest or an integer >= 1"),
        (
            {"model": {"quantization_config": {"quant_method": "bitsandbytes"}, "parallelism": "tensor"}},
            "only with gpus_per_replica=1, or model.parallelism=pipeline",
        ),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    model = ModelConfig(**settings.pop("model", {}))
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**{"gpus_per_replica": 2} | settings, model=model)
    assert message in str(caught.value)


def test_shards_that_do_not_divide_the_heads_are_refused_in_one_line(small_demo_dir):
    with nothing_left(), pytest.raises(ModelError) as caught:
        start(small_demo_dir, 4, 4)
    assert "gpus_per_replica=4: llama: num_key_value_heads=2: must be a multiple of gpus_per_replica" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
