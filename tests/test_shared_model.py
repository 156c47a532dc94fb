"""Concurrent and interrupted calls on one model object give the right tokens and leave it unchanged."""

import functools
import random

import pytest
import torch
from support import shared_model
from support.shared_model import call, interrupted, num_calls_of, run_threads, state_of
from support.small_models import random_model
from transformers import PreTrainedModel

from lp_runtime.model.hf.view import view_of

PROMPT = [3, 5, 7, 11, 3, 5]


@pytest.fixture(scope="module")
def shared() -> PreTrainedModel:
    """One model object for all calls of tests that leave it unchanged. It is checked once for strict calls."""
    return random_model(seed=3, attention_dropout=0.5, initializer_range=0.3)


@pytest.fixture
def model() -> PreTrainedModel:
    """A model object that a test may change."""
    return random_model(seed=3, initializer_range=0.3)


@pytest.fixture
def short_texts(monkeypatch) -> None:
    """Let calls return few tokens: an interrupt then often hits what a call sets up and undoes."""
    monkeypatch.setattr(shared_model, "NUM_NEW", 5)


@pytest.mark.slow
def test_four_threads_on_one_model_get_correct_tokens(shared):
    before = state_of(shared)
    assert run_threads(shared, 60) == (0, [])
    assert state_of(shared) == before


def test_dropout_is_off_for_model_in_train_mode(shared, short_texts):
    expected = call(shared, "fast", PROMPT)
    shared.train()
    try:
        before = state_of(shared)
        assert [call(shared, kind, PROMPT) for kind in ("fast", "strict")] == [expected, expected]
        assert state_of(shared) == before
    finally:
        shared.eval()


@pytest.mark.parametrize("kind", ["fast", "strict"])
def test_interrupts_leave_model_unchanged(shared, short_texts, kind):
    expected = call(shared, kind, PROMPT)
    num_calls = num_calls_of(lambda: call(shared, kind, PROMPT))
    before, rng, num_interrupted = state_of(shared), random.Random(1), 0
    for _ in range(12):
        num_interrupted += interrupted(lambda: call(shared, kind, PROMPT), rng.randint(1, num_calls))
        assert state_of(shared) == before
    assert num_interrupted > 6  # an interrupt in a destructor ends nothing
    assert call(shared, kind, PROMPT) == expected


def test_view_shares_only_weights_with_model(model):
    view = view_of(model, "eager")
    assert all(a is b for a, b in zip(view.parameters(), model.parameters(), strict=True))
    assert not {id(module) for module in view.modules()} & {id(module) for module in model.modules()}
    assert (view.config._attn_implementation, model.config._attn_implementation) == ("eager", "sdpa")
    assert all(module.config is view.config for module in view.modules() if hasattr(module, "config"))
    model.train()
    assert not any(module.training for module in view.modules())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not view(torch.tensor([PROMPT])).logits.any()


def test_view_rebinds_replaced_forward_and_unwraps_compiled_one(model):
    """A view handles the replacements by accelerate (a partial) and by torch.compile (a wrapper)."""
    layer = model.model.layers[0]
    calls = []

    def replaced(module, *args, **kwargs):
        calls.append(module)
        return type(module).forward(module, *args, **kwargs)

    layer.forward = functools.partial(replaced, layer)
    compiled = model.model.layers[1]
    method = compiled.forward

    def wrapper(*args, **kwargs):
        raise AssertionError("compiled for another attention")

    wrapper._torchdynamo_orig_callable = method
    compiled.forward = wrapper
    view = view_of(model)
    view(torch.tensor([PROMPT]))
    assert calls == [view.model.layers[0]]
