"""Configurations: the limit of positions, and models with latent attention."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, DeepseekV3Config, GPT2Config, LlamaConfig, MptConfig

from lp_runtime.model.hf.config import has_latents, max_positions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=64), 64),
        (GPT2Config(n_positions=32), 32),
        (MptConfig(max_seq_len=512), 512),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_limit_of_positions_is_read_from_the_field_of_each_type(config, expected):
    assert max_positions(config) == expected


def test_models_with_latents_are_recognized():
    assert has_latents(DeepseekV3Config()) and not has_latents(LlamaConfig())
    if "dots3_note_text" in CONFIG_MAPPING:  # not before transformers 5.23
        assert has_latents(AutoConfig.for_model("dots3_note_text"))  # each layer has its own size
