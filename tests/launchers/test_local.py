"""Tests of a replica in the caller's process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.processes import PATIENCE, Marked, in_fork

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN

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


def uses_all_threads(input_ids, scores):
    """A logits processor with an operation that torch divides among its threads."""
    torch.ones(1 << 20).exp()
    return scores


def test_forked_process_may_decode_although_torch_has_several_threads(tiny_model_dir):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with LookaheadRuntime(str(tiny_model_dir), device="cpu", lookahead=PLAIN) as runtime:

            def decode(used: LookaheadRuntime = runtime) -> list[int]:
                return used.generate([1, 2], 4, eos=False, processors=[uses_all_threads]).token_ids

            def decode_in_new_runtime() -> list[int]:
                with LookaheadRuntime(str(tiny_model_dir), device="cpu", lookahead=PLAIN) as another:
                    return decode(another)

            expected = str(decode())
            assert in_fork(decode, decode_in_new_runtime) == [expected] * 2
            assert torch.get_num_threads() == 2 and str(decode()) == expected
    finally:
        torch.set_num_threads(num_threads)
