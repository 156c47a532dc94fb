"""Sliding-window attention of prompts on a simulated GPU, with flash attention and without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from support import simulated_gpu as simulation
from support.simulated_gpu import Gpu, simulated_gpu
from support.small_models import FAMILIES, random_model
from support.thinned import thinned

from lp_runtime.model.attention import parts
from lp_runtime.model.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CUDA = torch.device("cuda", 0)
CHUNK, WINDOW = 12, 8
FLASH = "_flash_attention_forward"
PROMPT = [3 + 7 * number % 50 for number in range(4 * CHUNK)]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as gpu:
        parts.flash_has_windows.cache_clear()
        yield gpu
    parts.flash_has_windows.cache_clear()


def refuse(*args, **options):
    raise RuntimeError("This flash attention build does not support local attention.")


def ignore(*args, window_size_left, **options):
    """Compute plain causal attention, as builds without window support may do."""
    return simulation._flash_forward(*args, window_size_left=1 << 20, **options)


@pytest.mark.parametrize(("family", "flash"), thinned(3, ["mistral", "gemma3", "gpt_oss"], [None, refuse, ignore]))
def test_window_attention_uses_flash_only_if_it_supports_windows(gpu, family, flash, monkeypatch):
    """A kernel without windows is not used; one with windows reads only the window and the chunk."""
    given: list[int] = []

    def watched(*args, **options):
        given.append(args[6])
        return (flash or simulation._flash_forward)(*args, **options)

    monkeypatch.setitem(simulation.STAND_INS, FLASH, watched)
    name, settings = FAMILIES[family]
    whole = random_model(name, seed=3, initializer_range=0.3, **settings).bfloat16()
    model = ModelRunner(whole.to(CUDA), CHUNK, own_attention=True)
    assert parts.flash_has_windows(CUDA, torch.bfloat16, 8) == (flash is None)
    given.clear()
    with model.slots.borrowed() as slot:
        model.begin(slot, 100)
        actual = model.prefill(slot, PROMPT).cpu()
    num_layers = 2 if family == "mistral" else 1
    expected_keys = [CHUNK] * num_layers + [WINDOW - 1 + CHUNK] * 3 * num_layers
    assert given == (expected_keys if flash is None else [])
    free = ModelRunner(random_model(name, seed=3, initializer_range=0.3, **settings), 100, own_attention=True)
    with free.slots.borrowed() as slot:
        free.begin(slot, 100)
        expected = free.prefill(slot, PROMPT)
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)
