"""Results of `generate` besides tokens: a cache that can be continued, scores for stopping criteria."""

from __future__ import annotations

import functools

import pytest
import torch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.small_models import FAMILIES, random_model
from support.thinned import slow, thinned
from transformers import DynamicCache, GenerationConfig, StoppingCriteria

from lp_runtime import ConfigError, lookahead_generate
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.model.kv_cache.cache_names import cache_name

PROMPT = [[3, 5, 7, 11, 3, 5, 7]]
NUM_NEW = 12
NUM_CACHED = len(PROMPT[0]) + NUM_NEW - 1  # all tokens except the last


def both(model, ids, **options):
    """Return the outputs of `generate` without and with the drop-in."""
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(ids, **options), model.generate(ids, custom_generate=lookahead_generate, **options)


@pytest.mark.parametrize(
    "family", slow(["llama", "mistral", "gemma3", "mixtral", "gpt2"], ["mistral", "mixtral", "gpt2"])
)
def test_returned_cache_can_be_continued(family):
    name, settings = FAMILIES[family]
    model = random_model(name, seed=2, initializer_range=0.3, **settings)
    ids = torch.tensor(PROMPT)
    theirs, ours = both(model, ids, return_dict_in_generate=True)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == NUM_CACHED
    for mine, reference in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, reference.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(mine.values, reference.values, rtol=0, atol=1e-4)
    longer = torch.cat([theirs.sequences, torch.tensor([[9, 9]])], dim=1)
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(longer, past_key_values=theirs.past_key_values, **options)
    assert torch.equal(model.generate(longer, past_key_values=ours.past_key_values, **options), expected)


def test_cache_of_caller_is_filled(model):
    ids = torch.tensor(PROMPT)
    mine = DynamicCache()
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None}
    out = model.generate(ids, custom_generate=lookahead_generate, past_key_values=mine, **options)
    assert mine.get_seq_length() == NUM_CACHED
    longer, options["max_new_tokens"] = torch.cat([out, out[:, :3]], 1), 6
    again = model.generate(longer, past_key_values=mine, **options)
    assert torch.equal(again, model.generate(longer, **options))


@pytest.mark.parametrize("side", ["left", "right"])
def test_cache_of_padded_row_matches_row_decoded_alone(model, side):
    rows = torch.tensor([[3, 5, 7, 11], [0, 0, 9, 8] if side == "left" else [9, 8, 0, 0]])
    mask = (rows != 0).long()
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    ours = model.generate(rows, attention_mask=mask, custom_generate=lookahead_generate, **options)
    assert ours.past_key_values.get_seq_length() == rows.shape[1] + NUM_NEW - 1
    alone = model.generate(torch.tensor([[9, 8]]), **options)
    places = [*mask[1].nonzero()[:, 0].tolist(), *range(4, 3 + NUM_NEW)]
    for mine, reference in zip(ours.past_key_values.layers, alone.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys[1:, :, places], reference.keys, rtol=0, atol=1e-4)
        assert not mine.keys[1, :, [place for place in range(3 + NUM_NEW) if place not in places]].any()


@functools.cache  # a model is checked and measured once
def stateful(name):
    """Return (model whose layers carry states, name of its argument for a cache)."""
    model = small_model(small_config(name), seed=1)
    return model, cache_name(model)


def states_of(layer):
    """Return the convolution and recurrent states of a layer; empty if it has none."""
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [state for state in states if state is not None]


@pytest.mark.parametrize(
    ("name", "prompt"),
    thinned(
        8,
        slow(["qwen3_next", "falcon_h1", "lfm2_moe", "mamba2"], ["falcon_h1"]),
        [PROMPT, [[3, 5, 7, 11], [9, 8, 7, 4]]],
    ),
)
def test_returned_cache_with_states_can_be_continued(name, prompt):
    model, keyword = stateful(name)
    theirs, ours = both(model, torch.tensor(prompt), return_dict_in_generate=True)
    assert torch.equal(theirs.sequences, ours.sequences)
    longer = torch.cat([theirs.sequences, torch.tensor([[9, 9]]).expand(len(prompt), -1)], dim=1)
    num_states = 0
    for mine, reference in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        for state, expected in zip(states_of(mine), states_of(reference), strict=True):
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-4)
            assert not state.is_inference()
            num_states += 1
    assert num_states > 0
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(longer, **{keyword: theirs.past_key_values}, **options)
    assert torch.equal(model.generate(longer, **{keyword: ours.past_key_values}, **options), expected)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_cache_of_caller_receives_states_and_must_be_empty(name):
    model, keyword = stateful(name)
    caches = [DynamicCache(config=model.config.get_text_config()) for _ in range(2)]
    ids, options = torch.tensor(PROMPT), {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, **{keyword: caches[0]}, **options)
    model.generate(ids, **{keyword: caches[1]}, custom_generate=lookahead_generate, **options)
    for mine, reference in zip(caches[1].layers, caches[0].layers, strict=True):
        for state, expected in zip(states_of(mine), states_of(reference), strict=True):
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match=f"^{keyword}: must be empty"):
        model.generate(ids, **{keyword: caches[0]}, custom_generate=lookahead_generate, **options)


def test_cache_that_cannot_hold_states_is_refused():
    model, keyword = stateful("qwen3_next")
    with pytest.raises(ConfigError, match=rf"^{keyword}: must be a DynamicCache\(config=model.config\)"):
        model.generate(torch.tensor(PROMPT), custom_generate=lookahead_generate, **{keyword: DynamicCache()})


@pytest.mark.slow
def test_cache_of_indexed_layers_is_neither_returned_nor_filled(monkeypatch):
    monkeypatch.setattr(RuntimeConfig, "cache_dir", None)  # the call measures steps in the slot that it then decodes in
    model, keyword = stateful("deepseek_v32")
    theirs, ours = both(model, torch.tensor(PROMPT), return_dict_in_generate=True)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert ours.past_key_values is None
    mine = DynamicCache(config=model.config)
    with pytest.raises(ConfigError, match=f"^{keyword}: must be left out; a DynamicIndexedLayer holds more than keys"):
        model.generate(torch.tensor(PROMPT), custom_generate=lookahead_generate, **{keyword: mine})


def test_use_cache_false_returns_no_cache(model):
    theirs, ours = both(model, torch.tensor(PROMPT), return_dict_in_generate=True, use_cache=False, max_new_tokens=4)
    assert theirs.past_key_values is ours.past_key_values is None


class Watches(StoppingCriteria):
    """Keeps the scores that it receives, and stops when the top probability is below 0.3."""

    def __init__(self):
        self.given = []

    def __call__(self, input_ids, scores, **kwargs):
        self.given.append(None if scores is None else [each.clone() for each in scores])
        doubt = scores is not None and scores[-1].softmax(-1).amax() < 0.3
        return torch.full((len(input_ids),), bool(doubt) and input_ids.shape[1] > 15)


@pytest.mark.parametrize("with_scores", [True, False])
def test_stopping_criteria_receive_same_scores_as_in_generate(model, with_scores):
    results = []
    for custom in ({}, {"custom_generate": lookahead_generate}):
        watches = Watches()
        out = model.generate(
            torch.tensor(PROMPT), max_new_tokens=16, eos_token_id=None, stopping_criteria=[watches],
            return_dict_in_generate=True, output_scores=with_scores, **custom,
        )  # fmt: skip
        results.append((out.sequences.tolist(), watches.given))
    (expected, theirs), (sequences, ours) = results
    assert sequences == expected and (len(expected[0]) < len(PROMPT[0]) + 16) == with_scores
    assert len(ours) == len(theirs)
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None:
            torch.testing.assert_close(torch.cat(mine), torch.cat(reference), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": GenerationConfig(cache_implementation="quantized")}, "cache_implementation=quantized"),
        ({"mm_encoder_outputs": 1}, "images, videos or audio: must be left out"),
    ],
)
def test_options_that_would_change_output_are_refused(model, monkeypatch, options, message):
    monkeypatch.setattr(type(model), "_validate_model_kwargs", lambda *_: None)
    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", lambda *_: None)
    with pytest.raises(ConfigError, match=message) as caught:
        model.generate(torch.tensor(PROMPT), custom_generate=lookahead_generate, max_new_tokens=4, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_learned_prompts_are_refused(model):
    """PEFT replaces the method on the instance, for prompt, prefix and p-tuning."""
    before = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: before(*args, **kwargs)
    try:
        with pytest.raises(ConfigError, match="^prepare_inputs_for_generation: was replaced on the model"):
            model.generate(torch.tensor(PROMPT), custom_generate=lookahead_generate, max_new_tokens=4)
    finally:
        del model.prepare_inputs_for_generation
