"""Tests that compiled code is cached until any file that it was compiled from changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLEE = "from lp_runtime.utils.jit import compiled\n\n\n@compiled\ndef value():\n    return {}\n"
CALLER = """
from callee import value
from lp_runtime.utils.jit import compiled


@compiled
def caller():
    return value()


if __name__ == "__main__":
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


def output_of(folder: Path, *arguments: str) -> str:
    """Run Python in a folder, with compiled code cached next to it; return what it prints."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder.parent / "cache")}
    command = [sys.executable, "-B", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_scripts(folder: Path, number: int) -> Path:
    """Write a compiled function that calls another one, which returns a number; return their folder."""
    folder.mkdir(exist_ok=True)
    (folder / "caller.py").write_text(CALLER)
    (folder / "callee.py").write_text(CALLEE.format(number))
    return folder


@pytest.mark.slow
def test_caller_is_recompiled_after_its_callee_changes(tmp_path: Path):
    folder = tmp_path / "scripts"
    assert output_of(write_scripts(folder, 1), "caller.py") == "1 0"
    assert output_of(folder, "caller.py") == "1 1"
    assert output_of(write_scripts(folder, 2), "caller.py") == "2 0"


def test_is_cached_reports_whether_code_is_cached(tmp_path: Path):
    write_scripts(tmp_path / "scripts", 1)
    code = "import caller; from lp_runtime.utils.jit import is_cached; print(is_cached(caller.caller))"
    first = output_of(tmp_path / "scripts", "-c", code)
    output_of(tmp_path / "scripts", "caller.py")
    assert (first, output_of(tmp_path / "scripts", "-c", code)) == ("False", "True")


def test_copies_of_the_sources_share_compiled_code(tmp_path: Path):
    assert output_of(write_scripts(tmp_path / "first", 1), "caller.py") == "1 0"
    assert output_of(write_scripts(tmp_path / "second", 1), "caller.py") == "1 1"


def test_functions_compile_without_a_cache_folder(tmp_path: Path):
    (tmp_path / "cache").touch()  # a file in place of the folder
    assert output_of(write_scripts(tmp_path / "scripts", 1), "caller.py") == "1 0"


def test_function_is_recompiled_after_a_package_constant_changes(tmp_path: Path):
    inner = tmp_path / "root" / "package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "reexported.py").write_text("from package.constants import VALUE as VALUE\n")
    (inner / "user.py").write_text(USER)

    def run(number: int) -> str:
        (inner.parent / "constants.py").write_text(f"VALUE = {number}\n")
        return output_of(tmp_path / "root", "-m", "package.inner.user")

    assert run(1) == "1 0"
    assert run(1) == "1 1"
    assert run(2) == "2 0"
