"""Test of a script that ends while a request is being decoded."""

from __future__ import annotations

import subprocess
import sys

from support.processes import PATIENCE, marked

SCRIPT = """
import sys
from lp_runtime import LookaheadConfig, LookaheadRuntime, Scheduler

runtime = LookaheadRuntime(sys.argv[1], device="cpu", lookahead=LookaheadConfig(0, 2, 0, prior="none"))
job = Scheduler(runtime).stream([1, 2, 3], 200, eos=False)
next(iter(job))
"""


def test_script_may_end_without_closing_a_scheduler(tiny_model_dir, tmp_path):
    """The thread of the request is in a forward pass."""
    with marked() as mark:
        command = [sys.executable, "-c", SCRIPT, str(tiny_model_dir)]
        result = subprocess.run(
            command, cwd=tmp_path, env=mark.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert (result.returncode, result.stderr) == (0, "")
