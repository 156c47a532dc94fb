"""Tests of scripts/try_clients.py: installed clients are tried, and failures set the exit status."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import demo_model_that_chats, served

from lp_runtime import LookaheadConfig, LookaheadRuntime

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "try_clients.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return demo_model_that_chats(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def url(model_dir):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with (
        LookaheadRuntime(model_dir, device="cpu", dtype="float32", lookahead=lookahead) as runtime,
        served(runtime) as (url, _),
    ):
        yield url


def try_clients(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a PATH of only this environment's Python."""
    path = {"PATH": str(Path(sys.executable).parent)}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=path, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_installed_client_passes_and_missing_ones_are_skipped(url, model_dir, tmp_path):
    log = tmp_path / "log"
    log.write_text(json.dumps({"time": "before", "status": 404}) + "\n")
    done = try_clients(url, model_dir, log, "openai", "Open WebUI", "codex")
    assert done.returncode == 0, done.stderr
    openai, webui, codex = done.stdout.splitlines()
    assert openai.startswith("openai") and "FAILED" not in openai
    assert webui.endswith("is not installed") and codex.endswith("is not installed")


def test_failing_client_sets_the_exit_status(url, model_dir, tmp_path):
    log = tmp_path / "log"
    log.touch()
    done = try_clients(url, model_dir, log, "openai structure")  # a template without tools
    assert done.returncode == 1 and "openai structure" in done.stdout and "FAILED" in done.stdout


def test_unknown_client_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["try_clients.py", "http://127.0.0.1", "MODEL", "LOG", "nobody"])
    monkeypatch.syspath_prepend(SCRIPT.parent)  # it imports another script
    with pytest.raises(SystemExit, match="nobody: must be one of openai"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
