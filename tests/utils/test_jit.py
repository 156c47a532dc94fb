"""What was compiled is kept, and forgotten as soon as any file that it was compiled from has changed."""

import subprocess
import sys
from pathlib import Path

CALLEE = "from lp_runtime.utils.jit import compiled\n\n\n@compiled\ndef value():\n    return {}\n"
CALLER = """
from callee import value
from lp_runtime.utils.jit import compiled


@compiled
def caller():
    return value()


print(caller(), sum(caller.stats.cache_hits.values()))
"""
USER = """
from lp_runtime.utils.jit import compiled
from package.reexported import VALUE


@compiled
def user():
    return VALUE


print(user(), sum(user.stats.cache_hits.values()))
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


def test_a_function_is_compiled_again_when_a_constant_of_its_package_has_changed(tmp_path: Path):
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "reexported.py").write_text("from package.constants import VALUE as VALUE\n")
    (inner / "user.py").write_text(USER)

    def run(number: int) -> str:
        (inner.parent / "constants.py").write_text(f"VALUE = {number}\n")
        return subprocess.run(
            [sys.executable, "-B", "-m", "package.inner.user"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run(1) == "1 0"
    assert run(1) == "1 1"
    assert run(2) == "2 0"
