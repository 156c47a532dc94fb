"""Fixtures of the command line's tests: an empty working directory, refusals, a model to damage."""

from __future__ import annotations

import copy
import shutil

import pytest

# Modules that import torch are imported inside fixtures: tests/conftest.py must set up Triton first.


@pytest.fixture(scope="module", autouse=True)
def composed_once():
    """Let Hydra compose equal overrides once per file: it takes 0.15 s, and most tests have the same few."""
    from lp_runtime.config import overrides

    compose, known = overrides._compose, {}

    def compose_once(schema, given, config_dir):
        if config_dir is not None:
            return compose(schema, given, config_dir)
        key = (schema, *given)
        if key not in known:
            known[key] = compose(schema, given, None)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overrides, "_compose", compose_once)
        yield


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
