"""What was compiled is kept, and forgotten as soon as any file that it was compiled from has changed."""

import subprocess
import sys
from pathlib import Path

CALLEE = "from lp_runtime.lookahead.compiled import compiled\n\n\n@compiled\ndef value():\n    return {}\n"
CALLER = """
from callee import value
from lp_runtime.lookahead.compiled import compiled


@compiled
def caller():
    return value()


print(caller(), sum(caller.stats.cache_hits.values()))
"""


def test_a_caller_is_compiled_again_when_what_it_calls_has_changed(tmp_path: Path):
    (tmp_path / "caller.py").write_text(CALLER)

    def run(number: int) -> str:
        (tmp_path / "callee.py").write_text(CALLEE.format(number))
        return subprocess.run(
            [sys.executable, "-B", "caller.py"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run(1) == "1 0"
    assert run(1) == "1 1"
    assert run(2) == "2 0"
