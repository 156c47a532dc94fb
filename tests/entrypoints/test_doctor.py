"""Tests of lp-doctor: its report fits on a screen, and its exit status is 1 if something will fail."""

from __future__ import annotations

import resource
import signal
from importlib.metadata import version

import pytest

import lp_runtime
from lp_runtime.entrypoints import doctor
from lp_runtime.entrypoints.cli import doctor_main


@pytest.fixture
def report(capsys, tiny_model_dir):
    """Return a function that runs lp-doctor and returns its lines and its exit status."""

    def run(*overrides: str) -> tuple[list[str], int]:
        status = 0
        try:
            doctor_main([f"model.path={tiny_model_dir}", *overrides])
        except SystemExit as ended:
            status = ended.code
        return capsys.readouterr().out.splitlines(), status

    return run


def test_report_has_no_problem_on_a_working_machine(report):
    lines, status = report("device=cpu", "gpus=2")
    assert status == 0 and not any("PROBLEM" in line for line in lines) and len(lines) < 25
    text = "\n".join(lines)
    for expected in (
        f"lp_runtime {lp_runtime.__version__}",
        f"torch {version('torch')}",
        "gpus=2 on CPUs",
        "/dev/shm",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("name", "function", "overrides", "expected"),
    [
        ("why_no_gpu", lambda: "the NVIDIA driver is 550.54", [], "GPUs          PROBLEM: the NVIDIA driver is 550.54"),
        ("why_unavailable", lambda num: "/dev/shm: no room", ["gpus=2"], "shared memory PROBLEM: /dev/shm: no room"),
        ("free_bytes", lambda device: 1, [], "              PROBLEM: weights: 0.0 GiB of 0.0 GiB of free memory"),
    ],
)
def test_report_names_each_problem(report, monkeypatch, name, function, overrides, expected):
    monkeypatch.setattr(doctor, name, function)
    lines, status = report("device=auto", *overrides)
    assert status == 1
    assert [line for line in lines if "PROBLEM" in line and line.startswith(expected)]


def test_missing_home_folder_is_reported(report, monkeypatch):
    def fails():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(doctor, "cache_root", fails)
    lines, status = report("device=cpu")
    assert status == 1 and any("PROBLEM: cannot be kept" in line for line in lines)


def test_cache_folder_that_is_no_folder_is_reported(report, tmp_path):
    (tmp_path / "file").touch()
    lines, status = report("device=cpu", f"cache_dir={tmp_path}/file")
    assert status == 1 and any("cannot be written, so its content is computed again" in line for line in lines)


def test_cache_folder_on_a_full_disk_is_reported(report, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))  # files stay empty, as on a full disk
    try:
        lines, status = report("device=cpu", f"cache_dir={tmp_path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    problem = f"measurements  PROBLEM: {tmp_path}: cannot be written, so its content is computed again at every start"
    assert status == 1 and f"{problem}: File too large" in lines
    assert not list(tmp_path.iterdir())
