"""Scans of state-space layers are as short as the number of fed tokens allows."""

import pytest
import torch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.chain_models import model_of
from transformers import DynamicCache

from lp_runtime.model.chain_runner import MAX_CHUNK, ChainRunner, FittedScans

OWN_CHUNK = 256


@pytest.fixture
def model():
    config = small_config("granitemoehybrid")
    config.mamba_chunk_size = OWN_CHUNK
    return small_model(config, seed=3)


def chunks(model):
    return {module.chunk_size for module in model.modules() if hasattr(module, "chunk_size")}


@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (64, 64), (500, MAX_CHUNK)])
def test_chunk_size_is_fitted_to_the_number_of_tokens(model, num_tokens, chunk):
    scans = FittedScans(model)
    view = scans.model_for(num_tokens)
    assert chunks(view) == {chunk} and chunks(model) == {OWN_CHUNK}
    assert scans.model_for(num_tokens) is view


def test_chunk_size_never_exceeds_the_models(model):
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = 4
    scans = FittedScans(model)
    assert chunks(scans.model_for(2)) == {2}
    assert scans.model_for(30) is model


def test_model_without_scans_is_returned_unchanged():
    model = model_of("qwen3_next")
    assert FittedScans(model).model_for(3) is model


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_view_with_fitted_scans_matches_the_model(model, num_tokens):
    text, more = torch.arange(5, 25)[None], torch.arange(5, 5 + num_tokens)[None] % 50
    logits = []
    for runs in (model, FittedScans(model).model_for(num_tokens)):
        cache = DynamicCache(config=model.config)
        model(input_ids=text, past_key_values=cache)
        logits.append(runs(input_ids=more, past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_chain_passes_use_fitted_scans(model, monkeypatch):
    """A scan's input is as long as the chain, rounded up to a power of two."""
    runner, seen = ChainRunner(model, prefill_chunk=7), []

    def model_for(scans, num_tokens, original=FittedScans.model_for):
        seen.append((num_tokens, chunks(original(scans, num_tokens))))
        return original(scans, num_tokens)

    monkeypatch.setattr(FittedScans, "model_for", model_for)
    with runner.slots.borrowed() as slot:
        runner.begin(slot, 40)
        runner.prefill(slot, list(range(5, 15)))
        logits = runner.logits_after_each(slot, [[7], [8], [9]], [6])
    assert seen == [(7, {8}), (3, {4}), (2, {2})]
    whole = model(input_ids=torch.tensor([[6, 7], [6, 8], [6, 9]])).logits[:, -1]
    torch.testing.assert_close(logits.logits, whole, rtol=1e-4, atol=1e-5)
