"""The model of the drop-in's tests: half of the demo model."""

from __future__ import annotations

import pytest

# Modules that import torch are imported inside fixtures: tests/conftest.py must set up Triton first.


@pytest.fixture(scope="session")
def half_model_dir(shallow_demo):
    """The demo model with the last three of its six layers."""
    return shallow_demo(3)


@pytest.fixture(scope="session")
def model(half_model_dir):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(half_model_dir, dtype=torch.float32).eval()
