"""Triton's kernels are used only on supported GPUs, and only if a trial kernel runs correctly there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lp_runtime.kernels import dispatch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 7)


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Simulate a GPU; yield its capability and its trial kernel, which a test may change."""
    there = SimpleNamespace(capability=(9, 0), gate=lambda states: torch.tensor(0.73105857))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: there.capability)
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: None)
    monkeypatch.setattr(dispatch, "on", lambda device: nullcontext())
    kernels = SimpleNamespace(gate=lambda states: there.gate(states))
    monkeypatch.setattr(dispatch, "triton_gpu", lambda: kernels)
    dispatch.why_no_kernels.cache_clear()
    yield there
    dispatch.why_no_kernels.cache_clear()


def test_kernels_are_used_if_the_trial_kernel_runs(gpu, caplog):
    assert dispatch.kernels_for(GPU) is dispatch.triton_gpu()
    assert dispatch.kernels_for(CPU) is None
    assert not caplog.records


def test_kernels_are_not_used_if_triton_cannot_compile(gpu, caplog):
    def fail(states):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    gpu.gate = fail
    assert dispatch.kernels_for(GPU) is None and dispatch.kernels_for(GPU) is None
    (record,) = caplog.records  # logged once
    assert "Triton does not run on cuda:7: " in record.message and "Failed to find C compiler" in record.message
    assert dispatch.why_no_kernels(GPU) == "Triton does not run on cuda:7: Failed to find C compiler."


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_kernels_are_not_used_if_the_trial_result_is_wrong(gpu, value):
    gpu.gate = lambda states: torch.tensor(value)
    assert dispatch.kernels_for(GPU) is None


def test_kernels_are_not_used_on_old_gpus_or_without_triton(gpu, monkeypatch):
    gpu.capability = (7, 5)
    assert dispatch.kernels_for(GPU) is None
    assert dispatch.why_no_kernels(GPU) == "compute capability 7.5 is below 8.0"
    dispatch.why_no_kernels.cache_clear()
    gpu.capability = (8, 0)
    monkeypatch.setattr(dispatch, "triton_gpu", lambda: None)
    assert dispatch.kernels_for(GPU) is None
