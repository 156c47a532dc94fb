"""A part of `benchmarks/correctness.py types`: model types are decoded as by `generate`, or refused."""

import pytest
import torch
from support import causal_types
from support.causal_configs import DEFAULT, small_config, variants_of
from support.causal_types import outcome_of, small_model
from support.thinned import slow
from support.versions import needs_rotary_by_length, needs_transformers

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.model.checks.make_runner import make_runner
from lp_runtime.model.modules.packed_linear import pack_linears
from lp_runtime.replica import loading

EXACT = [
    ("bart", DEFAULT),
    ("deepseek_v3", DEFAULT),
    pytest.param("deepseek_v32", DEFAULT, marks=pytest.mark.slow),
    ("falcon", "ALiBi"),
    ("gemma3n_text", "shared layers"),
    pytest.param("gpt2", DEFAULT, marks=pytest.mark.slow),
    pytest.param("gpt_neo", "window_size=40", marks=pytest.mark.slow),
    pytest.param("lfm3", DEFAULT, marks=pytest.mark.slow),
    ("llama", "dynamic RoPE"),
    pytest.param("llama4_text", "no scaled queries", marks=pytest.mark.slow),
    pytest.param("mimo_v2_flash", "sliding_window=8", marks=pytest.mark.slow),
    pytest.param("nemotron", DEFAULT, marks=pytest.mark.slow),
    pytest.param("phi3", "long RoPE", marks=[needs_rotary_by_length, pytest.mark.slow]),
]
REFUSED = [
    pytest.param("jamba", DEFAULT, marks=pytest.mark.slow),
    ("mamba", DEFAULT),
    ("openai-gpt", DEFAULT),
    pytest.param("prophetnet", DEFAULT, marks=pytest.mark.slow),  # refused in test_chain_runner.py, too
]
# Beyond a threshold, attention depends on a token's place in the input or on the number of keys.
THRESHOLDS = [("doge", "keep_window_size=40"), ("llama4_text", "floor_scale=40")]
NEW_TOKENS = 12
PROMPT_TOKENS = (1, 34, 90)  # the shortest; decoded across 40 tokens, and across 96: thresholds of TYPES


@pytest.fixture(autouse=True)
def short_outputs(monkeypatch) -> None:
    monkeypatch.setattr(causal_types, "NEW_TOKENS", NEW_TOKENS)


@pytest.mark.parametrize(("model_type", "variant"), EXACT)
def test_supported_type_matches_generate(model_type, variant):
    outcome = outcome_of(model_type, variants_of(model_type)[variant], PROMPT_TOKENS)
    assert outcome.kind == "exact", outcome.reason
    assert not outcome.reason  # the output is varied enough to show something


def test_model_with_different_windows_in_its_layers_matches_generate():
    config = small_config("qwen3", {"sliding_window": 16, "layer_types": ["full_attention"] * 4})
    config.per_layer_config = {0: {"sliding_window": 8}}
    model = small_model(config)
    outcome = causal_types.compare(model, PROMPT_TOKENS[1:2])
    assert outcome.kind == "exact", outcome.reason
    assert make_runner(model, prefill_chunk=7).feeds_chains


def test_type_with_offset_positions_matches_generate():
    outcome = outcome_of("roberta", variants_of("roberta")[DEFAULT], PROMPT_TOKENS[1:])
    assert outcome.kind == "exact", outcome.reason


@pytest.mark.parametrize("model_type", slow(["deepseek_v2", "longcat_flash", "minicpm3"], ["longcat_flash"]))
def test_latent_attention_is_packed_and_batched(model_type, monkeypatch):
    monkeypatch.setattr(loading, "pack_fastest", lambda model: pack_linears(model) and "oneDNN")  # not measured
    config = RuntimeConfig(device="cpu", cache_dir=None)
    model, _ = loading.prepare_model(small_model(small_config(model_type)), config, torch.device("cpu"))
    assert model.supports_batching


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_config_that_asks_for_router_logits_is_accepted(model_type):
    config = small_config(model_type)
    config.output_router_logits = True
    on_cpu = RuntimeConfig(model=ModelConfig(packing="off"), device="cpu")
    loading.prepare_model(small_model(config), on_cpu, torch.device("cpu"))


@pytest.mark.parametrize(("model_type", "variant"), REFUSED)
def test_unsupported_type_is_refused_in_one_line(model_type, variant):
    outcome = outcome_of(model_type, variants_of(model_type)[variant])
    assert outcome.kind == "refused", outcome.reason


@pytest.mark.parametrize(("model_type", "variant"), THRESHOLDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_type_with_length_threshold_is_exact_or_refused(model_type, variant, seed):
    outcome = outcome_of(model_type, variants_of(model_type)[variant], prompts=PROMPT_TOKENS[1:2], seed=seed)
    assert outcome.kind in ("exact", "refused"), outcome.reason


@needs_transformers(23, "has all of these types")
def test_length_fields_have_variants():
    fields = {
        "doge": "keep_window_size",
        "gpt_neo": "window_size",
        "inkling_text": "log_scaling_n_floor",
        "llama4": "floor_scale",
        "ministral3": "original_max_position_embeddings",
        "mistral": "sliding_window",
    }
    for model_type, field in fields.items():
        assert field in {variant.split("=")[0] for variant in variants_of(model_type)}
    assert small_config("doge", variants_of("doge")["keep_window_size=40"]).keep_window_size == 40
