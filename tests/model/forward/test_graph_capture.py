"""CUDA graph captures that fail, on a simulated GPU: refused before they begin, or undone completely."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from support.simulated_gpu import Gpu, Graph, Stream, simulated_gpu

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.forward import fixed_passes
from lp_runtime.model.forward.cuda_graph import PassSet
from lp_runtime.model.forward.graph_capture import GraphCapture
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as gpu:
        yield gpu


def test_pass_that_synchronizes_is_refused_before_capture(gpu):
    there, runs = torch.ones(3, device=CUDA), []

    def run() -> None:
        runs.append(bool(there.sum() > 2))

    capture = GraphCapture(CUDA)
    with pytest.raises(ModelError, match="waits for the device, and cannot be captured"):
        capture.capture(run)
    assert runs == [True] and not Graph.captured
    assert torch.cuda.get_sync_debug_mode() == 0 and torch.cuda.current_stream() == Stream.of_device
    assert there.tolist() == [1.0] * 3  # waiting for the device is allowed again


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("no memory")])
def test_failed_capture_restores_the_stream_and_closes_the_pool(gpu, error, monkeypatch):
    """torch alone would leave its capture stream current and its pool open to later allocations."""
    closed, runs = [], []
    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", lambda *args: closed.append(args))

    def run() -> None:
        runs.append(torch.cuda.current_stream())
        if len(runs) == 3:
            raise error

    with pytest.raises(ModelError if type(error) is RuntimeError else torch.OutOfMemoryError):
        GraphCapture(CUDA).capture(run)
    assert len(closed) == 1 and closed[0][0] == 0
    assert len(set(runs)) == 1 and runs[0] != torch.cuda.current_stream() == Stream.of_device


def test_all_captures_share_one_stream_and_pool(gpu):
    streams, there = [], torch.ones(3, device=CUDA)
    capture = GraphCapture(CUDA)
    for _ in range(2):
        capture.capture(lambda: streams.append(torch.cuda.current_stream()) or there.add(1))
    assert len(set(streams)) == 1 and len({each.pool for each in Graph.captured}) == 1 and len(Graph.captured) == 2


def runner_of_demo() -> ModelRunner:
    model = ModelRunner(load_model(ModelConfig(), CUDA, "float32"), 512, own_attention=True)
    model.enable_graphs(capture=True)
    return model


@pytest.mark.slow
def test_sizes_that_exceed_memory_are_skipped(gpu, monkeypatch, caplog):
    monkeypatch.setattr(fixed_passes, "SIZES", (1, 4, 16, 32))
    monkeypatch.setattr(fixed_passes, "MIN_LARGEST", 4)
    model = runner_of_demo()
    run_pass = PassSet.run_pass

    def limited(self, one) -> None:
        if len(one.inputs.ids) > 16:
            raise torch.OutOfMemoryError("no memory")
        run_pass(self, one)

    monkeypatch.setattr(PassSet, "run_pass", limited)
    passes = model.fixed_passes
    assert list(passes.make_all(True)) == [(16, 1), (16, 16), (4, 1), (4, 4), (1, 1)]
    assert passes.max_tokens == 16 and "passes of 32 tokens" in caplog.text
    slot, tree = CacheSlot(), TokenTree(range(20), max_depth=1)
    model.begin(slot, 40)
    model.prefill(slot, [1, 2])
    assert model.forward(StepInputs.whole(slot, tree)).presampled is None  # fed in a pass of any size
    monkeypatch.setattr(fixed_passes, "MIN_LARGEST", 32)
    with pytest.raises(torch.OutOfMemoryError):
        list(runner_of_demo().fixed_passes.make_all(False))


def test_capture_time_is_excluded_from_pass_time(gpu):
    """Each run of the model takes a second here; a replay takes almost no time."""
    model = runner_of_demo()
    slot = CacheSlot()
    model.begin(slot, 40)
    model.prefill(slot, [1, 2])
    model.model.register_forward_pre_hook(lambda *args: torch.cuda._sleep(1_000_000_000))
    model.timer.start()
    model.forward(StepInputs.whole(slot, TokenTree([3], max_depth=1)))
    model.timer.stop()
    model.synchronize()
    assert Graph.captured and gpu.seconds_slept > 1 and model.timer.seconds() < 1
