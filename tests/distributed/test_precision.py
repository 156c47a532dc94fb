"""TF32: turned off in our own processes, and only warned about in the caller's process."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lp_runtime.model.checks import make_runner

# NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which torch reads when it is imported.
OURS = """
import torch
from lp_runtime.distributed.precision import turn_off_tf32
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
assert matmul.fp32_precision == cudnn.conv.fp32_precision == "tf32"
turn_off_tf32()
found = {matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision}
assert found <= {"ieee", "none"} and torch.get_float32_matmul_precision() == "highest", found
assert not matmul.allow_tf32 and not cudnn.allow_tf32  # which torch.compile reads
"""
THEIRS = """
import logging, sys, torch
exec(sys.argv[1])
from lp_runtime.distributed.precision import warn_of_tf32
logging.basicConfig()
warn_of_tf32()
warn_of_tf32()
"""


def run(code: str, override: str, *arguments: str) -> str:
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": override}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_turn_off_tf32_overrides_the_environment():
    assert run(OURS, "1") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "settings", "count"),
    [
        ("1", "", 1),
        pytest.param("0", "", 0, marks=pytest.mark.slow),
        pytest.param("0", "torch.backends.cuda.matmul.fp32_precision = 'tf32'", 1, marks=pytest.mark.slow),
        pytest.param("0", "torch.set_float32_matmul_precision('high')", 1, marks=pytest.mark.slow),
        ("1", "torch.set_float32_matmul_precision('highest')", 0),
    ],
)
def test_tf32_is_warned_about_once_if_enabled(override, settings, count):
    assert run(THEIRS, override, settings).count("float32 products are TF32") == count


@pytest.mark.parametrize(
    ("device", "dtype", "warns"),
    [("cuda", torch.float32, True), ("cuda", torch.bfloat16, False), ("cpu", torch.float32, False)],
)
def test_tf32_warning_applies_only_to_float32_models_on_gpus(device, dtype, warns, monkeypatch):
    asked = []
    monkeypatch.setattr(make_runner, "warn_of_tf32", lambda: asked.append(True))
    monkeypatch.setattr(make_runner, "why_chains", lambda model: None)
    monkeypatch.setattr(make_runner, "ModelRunner", lambda *arguments: None)
    make_runner.make_runner(SimpleNamespace(device=torch.device(device), dtype=dtype), 16)
    assert bool(asked) == warns
