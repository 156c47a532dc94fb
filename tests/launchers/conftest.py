"""The yardstick that every launcher is held to."""

from __future__ import annotations

import pytest
import reference


@pytest.fixture(scope="session")
def greedy(demo_model_dir) -> list[list[int]]:
    """What transformers' greedy decoding makes of reference.PROMPTS on the demo model."""
    return reference.greedy(demo_model_dir)
