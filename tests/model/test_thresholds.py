"""Config fields that the self-check treats as lengths beyond which a model's attention may change."""

import pytest
import transformers
from transformers import LlamaConfig, PreTrainedConfig

from lp_runtime.model.support import thresholds_of

ROPE = {
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def thresholds(**fields) -> dict[str, int]:
    return thresholds_of(PreTrainedConfig(max_position_embeddings=4096, **fields))


def test_unknown_fields_are_thresholds_and_sizes_are_not():
    assert thresholds(keep_window_size=64, hidden_size=48, num_experts=16, vocab_size=97, n_embd=32) == {
        "keep_window_size": 64
    }
    assert thresholds(nobody_knows=40, floor_scale=100.0, ratio=0.5, flag=True, tiny=3) == {
        "nobody_knows": 40,
        "floor_scale": 100,
    }
    assert thresholds(n_positions=512, eos_token_id=77, rope_theta=10000.0, max_window_layers=28) == {}


def test_nested_fields_are_thresholds_except_of_other_models():
    assert thresholds(attn_config={"local_window": 9}, vision_config={"window_size": 14}) == {
        "attn_config.local_window": 9
    }


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_rotary_embedding_that_is_computed_once_has_no_threshold(kind):
    rope = ROPE | {"rope_type": kind}
    assert thresholds(rope_parameters=rope) == {}
    assert thresholds(rope_parameters=rope | {"nobody_knows": 0.1}) == {
        "rope_parameters.original_max_position_embeddings": 8192
    }


@pytest.mark.parametrize(
    "name", ["Llama", "Qwen3", "Gemma", "Olmo2", "GPT2", "Phi", "StableLm", "Granite", "Cohere", "SmolLM3"]
)
def test_common_families_have_no_long_thresholds(name):
    actual = thresholds_of(getattr(transformers, f"{name}Config")())
    assert all(length <= 64 for length in actual.values()), actual


def test_sliding_window_is_a_threshold():
    assert thresholds_of(transformers.MistralConfig(sliding_window=4096)) == {"sliding_window": 4096}
    assert thresholds_of(LlamaConfig()) == {}
