"""Fixtures for all tests. Models are tiny and random, made by transformers itself; only the demo model is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import small_models
import torch

from lp_runtime.config import DEMO_MODEL

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_model() -> Callable:
    """Factory: a tiny random causal LM, float32, `name` as in LlamaConfig, `settings` for its config."""
    return small_models.random_model


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory) -> Callable[..., Path]:
    """Factory: saves a tiny random model (arguments as `random_model`), without a tokenizer; returns its directory."""

    def make(name: str = "Llama", seed: int = 0, **settings) -> Path:
        path = tmp_path_factory.mktemp(name.lower())
        small_models.random_model(name, seed, **settings).save_pretrained(path)
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
