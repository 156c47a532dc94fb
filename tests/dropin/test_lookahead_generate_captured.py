"""The drop-in on a simulated GPU: passes are captured once per model, and again if the model changes."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.simulated_gpu import Gpu, Graph, simulated_gpu

from lp_runtime import LookaheadConfig, lookahead_generate
from lp_runtime.config.settings import ModelConfig
from lp_runtime.model.checks import self_check
from lp_runtime.model.forward import fixed_passes
from lp_runtime.model.loading.loader import load_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = (1, 8, 32)  # of captured passes
LOOKAHEAD = LookaheadConfig(5, 4, 5)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Gpu]:
    monkeypatch.setattr(fixed_passes, "SIZES", SIZES)
    monkeypatch.setattr(fixed_passes, "MIN_LARGEST", SIZES[-1])
    with simulated_gpu() as gpu:
        yield gpu


@pytest.fixture
def settings(half_model_dir) -> ModelConfig:
    return ModelConfig(path=str(half_model_dir))


def generate(model, length: int, num_tokens: int, **others) -> list[int]:
    ids = torch.arange(300, 300 + length, device=model.device)[None]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": num_tokens}
    if model.device.type == "cuda":
        options |= {"custom_generate": lookahead_generate, "lookahead": LOOKAHEAD} | others
    return model.generate(ids, **options)[0, length:].tolist()


@pytest.mark.slow
def test_calls_share_graphs_until_model_changes(gpu, settings):
    expected, model = (load_model(settings, device, "float32") for device in (CPU, CUDA))
    num_captures = []
    for length, num_tokens in ((12, 20), (300, 8), (5, 30)):
        assert generate(model, length, num_tokens) == generate(expected, length, num_tokens)
        num_captures.append(len(Graph.captured))
    assert num_captures == [len(SIZES)] * 3

    for one in (model, expected):  # a weight at another address
        one.lm_head.weight = torch.nn.Parameter(-one.lm_head.weight.detach(), requires_grad=False)
    assert generate(model, 12, 9) == generate(expected, 12, 9)
    assert len(Graph.captured) > len(SIZES)
    num_before = len(Graph.captured)
    for one in (model, expected):  # a hook, which a view calls as the model would
        one.model.layers[2].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    assert generate(model, 12, 9) == generate(expected, 12, 9)
    assert len(Graph.captured) > num_before


@pytest.fixture
def one_layer(shallow_demo) -> ModelConfig:
    """A model whose passes and checks are quick to simulate."""
    return ModelConfig(path=str(shallow_demo(1)))


@pytest.mark.parametrize("exactness", ["fast", pytest.param("strict", marks=pytest.mark.slow)])
def test_step_waits_once_and_launches_only_graphs(gpu, one_layer, exactness, monkeypatch):
    """A step after the prefill waits once and launches nothing outside of graphs."""
    monkeypatch.setattr(self_check, "STRICT_LENGTHS", (20,))
    monkeypatch.setattr(self_check, "LONG_STRICT_LENGTHS", ())
    model, counts = load_model(one_layer, CUDA, "float32"), []
    lookahead = replace(LOOKAHEAD, prior="none")  # otherwise calls measure the vocabulary prior in separate passes
    options = {"exactness": exactness, "strict_tokens": 32, "lookahead": lookahead}
    expected = generate(model, 12, 24, **options)  # captures, and measures
    num_captures = len(Graph.captured)
    assert num_captures == (len(SIZES) if exactness == "fast" else 1)
    for num_tokens in (1, 24):
        gpu.waits.clear()
        gpu.launches.clear()
        gpu.launch_places.clear()
        assert generate(model, 12, num_tokens, **options) == expected[:num_tokens]
        counts.append((Counter(gpu.waits), gpu.launch_places.copy(), gpu.launches["graph"]))
    waits, launches, num_replays = (later - earlier for earlier, later in zip(*counts, strict=True))
    assert waits == {"exchange.py: finish": num_replays} and 3 < num_replays < 24
    assert not launches and len(Graph.captured) == num_captures


class Streamer:
    """Makes another call during the first one, as another thread might."""

    def __init__(self, model):
        self.model, self.actual = model, None

    def put(self, tokens) -> None:
        if self.actual is None and tokens.numel() == 1:
            self.actual = []
            self.actual = generate(self.model, 9, 12)

    def end(self) -> None:
        pass


@pytest.mark.slow
def test_concurrent_calls_use_separate_runners(gpu, settings):
    model = load_model(settings, CUDA, "float32")
    expected = [generate(model, length, 12) for length in (9, 7)]
    streamer = Streamer(model)
    assert generate(model, 7, 12, streamer=streamer) == expected[1] and streamer.actual == expected[0]
    assert len(SIZES) < len(Graph.captured) <= 2 * len(SIZES)


@pytest.mark.slow
def test_model_can_be_garbage_collected_after_call(gpu, settings):
    model = load_model(settings, CUDA, "float32")
    generate(model, 5, 3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
