"""Small trained models for the server's tests: what is served matters less than how."""

from __future__ import annotations

import shutil
from pathlib import Path

import certifi
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


@pytest.fixture(scope="session")
def one_authority(tmp_path_factory) -> Path:
    """A file with one certificate authority instead of all that clients know."""
    end = "-----END CERTIFICATE-----\n"
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    return path


@pytest.fixture(scope="module", autouse=True)
def quick_clients(one_authority):
    """Let clients of the openai and anthropic packages read one authority: reading all takes 0.1 s per client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(one_authority))
        yield
