"""Early check that the configured model exists. Imports nothing slow."""

from __future__ import annotations

from pathlib import Path

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ModelError


def check_location(config: ModelConfig) -> None:
    """Refuse a model directory that does not exist, before any process is started.

    A location that is written as a path must be a directory with a config.json, and with safetensors files unless the
    settings allow pickled weights. A hub id is not looked up.
    """
    path = Path(config.location)
    try:
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelError(f"model.path={config.location}: the directory has no config.json")
            if config.use_safetensors and any(path.glob("pytorch_model*")) and not any(path.glob("*.safetensors")):
                raise ModelError(
                    f"model.path={config.location}: has pickled weights only, and a pickle can run code; convert them"
                    " to safetensors (save_pretrained), or allow them with model.use_safetensors=false"
                )
        elif path.exists() or config.location.startswith(("/", ".", "~")) or config.location.count("/") > 1:
            raise ModelError(f"model.path={config.location}: no such directory")
    except OSError as error:  # e.g. the name is too long, or a folder is not accessible
        raise ModelError(f"model.path={config.location}: {error.strerror}") from error
