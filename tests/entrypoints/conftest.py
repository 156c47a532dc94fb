"""Fixtures of the command line's tests: an empty working directory, refusals, a model to damage."""

from __future__ import annotations

import shutil

import pytest

# Modules that import torch are imported inside fixtures: tests/conftest.py must set up Triton first.


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run the test in an empty folder, which must stay empty."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def refusal(capsys):
    """Return a function that runs a command line that must be refused and returns its only error line."""
    from lp_runtime.entrypoints.cli import main

    def run(*arguments: str, status: int = 2) -> str:
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert caught.value.code == status
        assert out == ""
        assert "Traceback" not in err
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    return run


@pytest.fixture
def model_copy(tiny_model_dir, tmp_path):
    """Return a copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_model_dir, tmp_path / "broken")
