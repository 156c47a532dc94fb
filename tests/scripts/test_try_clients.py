"""Tests of scripts/try_clients.py: installed clients are tried, and failures set the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import demo_model_that_chats, served

from lp_runtime import LookaheadConfig, LookaheadRuntime

ROOT = Path(__file__).resolve().parents[2]


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
    script = ROOT / "scripts" / "try_clients.py"
    path = {"PATH": str(Path(sys.executable).parent)}
    return subprocess.run(
        [sys.executable, script, *arguments], env=path, capture_output=True, text=True, check=False, timeout=120
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
    assert "nobody: must be one of openai" in try_clients(url, model_dir, log, "nobody").stderr
