"""Slots begin small and grow with their texts: outputs do not change; the oldest requests keep theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.batches import FIXED, decode_batch
from support.chain_models import model_of, request_of
from support.engines import engine_of

from lp_runtime.config.settings import ModelConfig
from lp_runtime.engine.batch import Arrival
from lp_runtime.errors import RequestMemoryError
from lp_runtime.model import runner
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.kv_cache import slots
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

CPU = torch.device("cpu")
SPACE = 3  # tokens
LENGTH = 200  # of the output
REQUEST = Request((336, 3422, 63, 2722, 8, 1298, 12, 1210), FIXED, LENGTH)


@pytest.fixture
def growths(monkeypatch) -> Iterator[list[int]]:
    """Capacities that caches grow to once this fixture is requested; slots then begin with little room."""
    results: list[int] = []
    grow = TreeCache.grow
    monkeypatch.setattr(slots, "GROWTH_TOKENS", SPACE)
    monkeypatch.setattr(runner, "GROWTH_TOKENS", SPACE)
    monkeypatch.setattr(TreeCache, "grow", lambda self, capacity: results.append(capacity) or grow(self, capacity))
    yield results


def load(strict_tokens: int | None = None) -> ModelRunner:
    return ModelRunner(load_model(ModelConfig(), CPU, "float32"), 16, strict_tokens, own_attention=True)


def tokens_of(model: ModelRunner, request: Request) -> list[int]:
    *outputs, report = engine_of(model).run(request)
    assert isinstance(report, Report)
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("strict_tokens", [None, pytest.param(32, marks=pytest.mark.slow)])
def test_output_does_not_depend_on_initial_slot_capacity(strict_tokens, request):
    expected = tokens_of(load(strict_tokens), REQUEST)
    growths = request.getfixturevalue("growths")
    assert tokens_of(load(strict_tokens), REQUEST) == expected
    assert len(growths) > 1 and growths == sorted(growths)


@pytest.mark.slow
def test_growing_slots_keep_output_of_model_with_states(request):
    """Growing slots keep the text of such a model, although the next step may commit its fed guesses."""
    model, asked = model_of("qwen3_next"), replace(request_of(1), max_new_tokens=LENGTH)
    expected = tokens_of(ChainRunner(model, 7), asked)
    growths = request.getfixturevalue("growths")
    assert tokens_of(ChainRunner(model, 7), asked) == expected and growths


def test_youngest_request_leaves_batch_when_slots_cannot_grow(request):
    model = load()
    expected = tokens_of(model, REQUEST)
    request.getfixturevalue("growths")
    model.slots.clear()
    model.slots.limit = 5 * (len(REQUEST.prompt_ids) + LENGTH) // 2  # for two texts and a half
    actual = decode_batch(engine_of(model), {1: [Arrival(name, REQUEST) for name in "abc"]})
    ended = {key: isinstance(end, RequestMemoryError) for key, (_, _, end) in actual.items()}
    assert ended == {"a": False, "b": False, "c": True}
    assert actual["a"][0] == actual["b"][0] == expected
    tokens = actual["c"][0]
    assert tokens == expected[: len(tokens)] and model.slots.capacity <= model.slots.limit
