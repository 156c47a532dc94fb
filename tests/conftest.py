"""Fixtures for all tests. Models are tiny and random, made by transformers itself; only the demo model is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from lp_runtime.config import DEMO_MODEL

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _random_model(name: str = "Llama", seed: int = 0, attention: str | None = None, **settings):
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**(SHAPE | settings))
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@pytest.fixture(scope="session")
def random_model() -> Callable:
    """Factory: a tiny random causal LM, float32, `name` as in LlamaConfig, `settings` for its config."""
    return _random_model


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory) -> Callable[..., Path]:
    """Factory: saves a tiny random model (arguments as `random_model`), without a tokenizer; returns its directory."""

    def make(name: str = "Llama", seed: int = 0, **settings) -> Path:
        path = tmp_path_factory.mktemp(name.lower())
        _random_model(name, seed, **settings).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_model_dir) -> Path:
    """A tiny random Llama: 64 token ids, a context of 256, no tokenizer, no end-of-sequence token."""
    return make_model_dir()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The trained model that comes with the package, tokenizer included."""
    return DEMO_MODEL
