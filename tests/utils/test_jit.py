"""Tests that compiled code is cached until any file that it was compiled from changes."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import FunctionCache
from support.forked import run_forked

from lp_runtime.utils import jit

CALLEE = "from lp_runtime.utils.jit import compiled\n\n\n@compiled\ndef value():\n    return {}\n"
CALLER = """
from callee import value
from lp_runtime.utils.jit import compiled, is_cached


@compiled
def caller():
    return value()


if __name__ == "__main__":
    print(is_cached(caller), caller(), is_cached(caller), sum(caller.stats.cache_hits.values()))
"""
USER = """
from lp_runtime.utils.jit import compiled
from package.reexported import VALUE


@compiled
def user():
    return VALUE


print(user(), sum(user.stats.cache_hits.values()))
"""


def output_of(folder: Path, script: str, cpu: str | None = None) -> str:
    """Run a module of a folder in a fresh process, with compiled code cached next to the folder; return its output.

    The code is compiled for a CPU by LLVM's name; None for this machine's.
    """
    code = (
        "import runpy, sys, numba\n"
        f"numba.config.CACHE_DIR = {str(folder.parent / 'cache')!r}\n"
        f"numba.config.CPU_NAME = {cpu!r}\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "sys.dont_write_bytecode = True\n"  # by which a constant of the same size would not change
        f"runpy.run_module({script!r}, run_name='__main__', alter_sys=True)\n"
    )
    done = run_forked(exec, code, {}, cwd=folder)
    assert done.returncode == 0, done.stderr
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
    assert output_of(write_scripts(folder, 1), "caller") == "False 1 True 0"
    assert output_of(folder, "caller") == "True 1 True 1"
    assert output_of(write_scripts(folder, 2), "caller") == "False 2 True 0"


def test_copies_of_the_sources_share_compiled_code(tmp_path: Path):
    """`is_cached` reports whether the code is cached."""
    assert output_of(write_scripts(tmp_path / "first", 1), "caller") == "False 1 True 0"
    assert output_of(write_scripts(tmp_path / "second", 1), "caller") == "True 1 True 1"


def test_code_for_another_cpu_is_not_used(tmp_path: Path):
    folder = write_scripts(tmp_path / "scripts", 1)
    for cpu in (None, "generic"):
        assert output_of(folder, "caller", cpu) == "False 1 True 0"
        assert output_of(folder, "caller", cpu) == "True 1 True 1"


def test_code_in_a_folder_that_cannot_be_written_is_loaded(tmp_path: Path):
    folder = write_scripts(tmp_path / "scripts", 1)
    read_only = (
        "import errno\nfrom numba.core.caching import _CacheLocator\n"
        "def refuse(*_): raise PermissionError(errno.EACCES, 'Permission denied')\n"
        "_CacheLocator.ensure_cache_path = refuse\n"
    )
    (folder / "reader.py").write_text(f"{read_only}import runpy\nrunpy.run_module('caller', run_name='__main__')\n")
    assert output_of(folder, "reader") == "True 1 True 0"  # nothing is cached, or can be
    assert output_of(folder, "caller") == "False 1 True 0"
    assert output_of(folder, "reader") == "True 1 True 1"


def test_functions_compile_without_a_cache_folder(tmp_path: Path):
    (tmp_path / "cache").touch()  # a file in place of the folder
    assert output_of(write_scripts(tmp_path / "scripts", 1), "caller") == "True 1 True 0"


def compile_twice():
    """Compile two functions, each in a process's turn, as a start does."""
    for number in (3, 1.5):
        compiled = jit.compiled(lambda number: 2 * number)
        jit.compiles(lambda compiled=compiled, number=number: compiled(number))()


@pytest.mark.parametrize("is_silent", [False, True])
def test_start_without_a_cache_folder_is_reported_by_one_process(tmp_path: Path, monkeypatch, caplog, is_silent: bool):
    (tmp_path / "file").touch()
    monkeypatch.setitem(jit._numba_config, "CACHE_DIR", str(tmp_path / "file" / "numba"))
    monkeypatch.setattr(jit, "UNSAVED", jit.UnsavedCode())
    monkeypatch.setattr(jit, "_cache_folders", set())
    jit.UNSAVED.is_silent = is_silent  # as in replicas other than a machine's first one
    compile_twice()
    assert caplog.messages == [
        f"compiled code cannot be kept in {tmp_path}/file/numba, so each start compiles it again: Not a directory;"
        " set NUMBA_CACHE_DIR, or cache_dir of a command, to a folder that can be written"
    ] * (not is_silent)


def test_functions_are_compiled_if_the_disk_of_the_cache_is_full(tmp_path: Path, monkeypatch, caplog):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(jit._numba_config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(FunctionCache, "save_overload", fails)
    monkeypatch.setattr(jit, "UNSAVED", jit.UnsavedCode())
    compile_twice()
    (warning,) = caplog.messages
    assert (
        warning.startswith(f"compiled code cannot be kept in {tmp_path}, so") and "No space left on device" in warning
    )


def test_function_is_recompiled_after_a_package_constant_changes(tmp_path: Path):
    inner = tmp_path / "root" / "package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "reexported.py").write_text("from package.constants import VALUE as VALUE\n")
    (inner / "user.py").write_text(USER)

    def run(number: int) -> str:
        (inner.parent / "constants.py").write_text(f"VALUE = {number}\n")
        return output_of(tmp_path / "root", "package.inner.user")

    assert run(1) == "1 0"
    assert run(1) == "1 1"
    assert run(2) == "2 0"


def test_function_of_a_script_is_recompiled_after_lp_runtime_changes(tmp_path: Path):
    package = tmp_path / "lp_runtime"
    shutil.copytree(Path(jit.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "scripts" / "user.py"
    script.parent.mkdir()
    script.write_text(USER.replace("package.reexported", "lp_runtime.number"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(number: int) -> str:
        (package / "number.py").write_text(f"VALUE = {number}\n")
        command = [sys.executable, "-B", str(script)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert run(1) == "1 0"
    assert run(1) == "1 1"
    assert run(2) == "2 0"
