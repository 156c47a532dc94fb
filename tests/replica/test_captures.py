"""Passes that are captured at start: their number by launcher, and the memory of their logits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from support.simulated_gpu import Gpu, Graph, simulated_gpu

from lp_runtime import LookaheadRuntime
from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.launchers.worker import replica_server
from lp_runtime.launchers.worker.process_host import Placement
from lp_runtime.model.forward import fixed_passes
from lp_runtime.model.forward.cuda_graph import PassSize
from lp_runtime.replica import loading
from lp_runtime.replica.loaded_model import load_replica
from lp_runtime.replica.loading import ready_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CUDA = torch.device("cuda", 0)
SIZES = (1, 4, 16)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Gpu]:
    with simulated_gpu() as gpu:
        monkeypatch.setattr(fixed_passes, "SIZES", SIZES)
        monkeypatch.setattr(fixed_passes, "MIN_LARGEST", SIZES[-1])
        yield gpu


@pytest.mark.slow
def test_replica_without_batches_captures_one_pass_per_size(gpu):
    """With one GPU, lp-generate, lp-chat and the Python API never batch."""
    config = GenerateConfig(prompt="def f():", dtype="float32", cache_dir=None, lookahead=PLAIN)
    with LookaheadRuntime.from_config(config):
        assert len(Graph.captured) == len(SIZES)


@pytest.mark.parametrize(
    ("config", "batches"),
    [
        (RuntimeConfig(gpus=2), False),
        (GenerateConfig(prompt="a", gpus=2), False),
        (GenerateConfig(prompts="a.jsonl", output="b.jsonl", policy="fair"), True),
        (GenerateConfig(prompts="a.jsonl", output="b.jsonl", policy="throughput", max_batch=1), False),
        (ServeConfig(), True),
        (ServeConfig(policy="latency"), False),
    ],
)
def test_replica_process_captures_batches_only_if_policy_batches(config, batches, monkeypatch):
    """lp-serve batches by default, and so do prompts of a file with another policy than latency."""
    asked: list[bool] = []

    def load(*args, batches: bool, **options):
        asked.append(batches)
        raise RuntimeError("enough is known")

    monkeypatch.setattr(replica_server, "load_replica", load)
    replica_server.ReplicaServer(config, Placement(0, 1), lambda message: None).run()
    assert asked == [batches]


@pytest.mark.slow
def test_captured_passes_share_logits_memory(gpu):
    model, _ = ready_model(RuntimeConfig(dtype="float32"), CUDA)
    assert len(Graph.captured) == 2 * len(SIZES) - 1  # for several sequences, too, except for one token
    made = model.passes.made
    sizes = [PassSize(size, count) for size in SIZES for count in (1, fixed_passes.MAX_SEQUENCES)]
    with torch.inference_mode():
        logits = [made.run(size, ()) for size in sizes if size in made]
    assert len(logits) == 2 * len(SIZES) - 1
    (storage,) = {each.memory.untyped_storage() for each in logits}
    assert storage.nbytes() == SIZES[-1] * model.vocabulary_size * model.dtype.itemsize


@pytest.mark.slow
def test_sampling_of_generation_config_runs_at_start(gpu, monkeypatch):
    """Kernels of sampling are compiled at start; other values of top_k need no other variant."""

    def load(*args):
        model = load_model(*args)
        model.generation_config.update(do_sample=True, top_k=20, top_p=0.9)
        return model

    load_model = loading.load_model
    monkeypatch.setattr(loading, "load_model", load)
    load_replica(RuntimeConfig(dtype="float32", compile="off", cache_dir=None), 0, 1, owns_process=False)
    assert gpu.launches["find_cut"] == 1
