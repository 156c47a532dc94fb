"""Small trained models for the server's tests: what is served matters less than how."""

from __future__ import annotations

import shutil

import pytest

# Modules that import torch are imported inside fixtures: tests/conftest.py must set up Triton first.


@pytest.fixture(scope="session")
def small_model_that_chats(small_demo_dir, tmp_path_factory):
    """Return a function that writes a copy of the small model with a chat template and returns its folder."""
    from support.serving import TEMPLATE

    def write(template: str = TEMPLATE):
        folder = shutil.copytree(small_demo_dir, tmp_path_factory.mktemp("chats") / "model")
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return write
