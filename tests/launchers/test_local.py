"""Tests of a replica in the caller's process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.processes import PATIENCE, Marked

SCRIPT = """
from lp_runtime import LookaheadRuntime

runtime = LookaheadRuntime(device="cpu")
print(len(runtime.generate("def f(", 8).token_ids))
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("", 0), pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.slow)])
def test_script_that_never_closes_its_runtime_exits_cleanly(tmp_path, end, status):
    """The caches are empty, so measurements of the model remain to be written at exit."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        env=Marked(HOME=str(tmp_path)).environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "8\n", "")
    assert list(tmp_path.rglob("*vocabulary*")), "what was measured is kept"
