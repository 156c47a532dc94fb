"""The model of the drop-in's tests: half of the demo model."""

from __future__ import annotations

import json
import shutil

import pytest

# Modules that import torch are imported inside fixtures: tests/conftest.py must set up Triton first.


@pytest.fixture(scope="session")
def half_model_dir(demo_model_dir, tmp_path_factory):
    """The demo model with three of its six layers."""
    folder = shutil.copytree(demo_model_dir, tmp_path_factory.mktemp("half") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return folder


@pytest.fixture(scope="session")
def model(half_model_dir):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(half_model_dir, dtype=torch.float32).eval()
