"""Tests of the table of splits against a row computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.versions import needs_sliced_vocabulary
from transformers import LlamaConfig

from lp_runtime.config.settings import ModelConfig
from lp_runtime.model.capacity import NCCL_BYTES
from lp_runtime.model.loading.sizes import size_of_model

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    from studies import splits_on_paper

    return splits_on_paper


@pytest.fixture(scope="module")
def size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1000, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return size_of_model(ModelConfig(path=str(folder)), "auto", 100)


@needs_sliced_vocabulary
def test_cost_of_step_matches_hand_computation(study, size):
    """A step on 2 replicas x 4 GPUs, of 10 tokens after 100 tokens, has the cost computed by hand."""
    machine = study.Machine(hbm=1e9, link=1e8, collective=1e-5, memory=1e12)
    cost = study.cost_of_step(size, 2, 4, 10, 100, machine)
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64  # queries, keys and values, output, MLP: 36 864
    sliced, norms = 2 * layer + 2 * 1000 * 64, 5 * 64
    frequencies = 2 * 4 * 4  # of the rotary embedding, float32: those in use and the original ones
    assert cost.held == 2 * (sliced // 4 + norms) + frequencies
    keys = 100 * 2 * 2 * 8 * 2  # tokens, layers, keys and values, one head of 8, bytes
    assert cost.read == cost.held - 2 * 1000 * 64 // 4 + keys
    sums = 5 * 10 * 64 * 2  # all-reduces of 10 tokens: two per layer and one for the embeddings
    assert cost.sent == (2 * sums + 10 * 1000 * 2) * 3 // 4 == 24600
    assert cost.collectives == 5 + 1 + 1
    assert cost.seconds == pytest.approx(cost.read / 1e9 + 24600 / 1e8 + 7e-5)
    assert cost.fits


def test_one_gpu_sends_nothing_and_memory_is_checked(study, size):
    machine = study.Machine(1.0, 1.0, 1.0, size.needed_bytes(1))
    alone = study.cost_of_step(size, 1, 1, 10, 100, machine)
    assert (alone.sent, alone.collectives, alone.fits) == (0, 0, True)
    assert not study.cost_of_step(size, 1, 1, 10, 100, machine._replace(memory=machine.memory - 1)).fits
    assert not study.cost_of_step(size, 8, 1, 10, 100, machine).fits  # exchanges take NCCL_BYTES
    assert (
        study.cost_of_step(size, 8, 1, 10, 100, machine._replace(memory=machine.memory + NCCL_BYTES)).collectives == 1
    )
