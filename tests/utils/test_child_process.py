"""Tests that a child process imports its parent's modules and nothing from the working directory."""

import subprocess
import sys

from lp_runtime.utils.startup import python_command

MODULE = """
import random, queue, helper
print(random.random() < 1, helper.VALUE)
"""


def test_child_imports_only_from_the_parents_path(tmp_path, monkeypatch):
    beside_the_script, working_directory = tmp_path / "scripts", tmp_path / "work"
    for folder in (beside_the_script, working_directory):
        folder.mkdir()
    for name in ("random", "queue", "helper"):
        (working_directory / f"{name}.py").write_text("raise SystemExit('executed')")
    (beside_the_script / "helper.py").write_text("VALUE = 7")
    (beside_the_script / "job.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(beside_the_script), *sys.path])
    done = subprocess.run(python_command("job"), cwd=working_directory, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 7\n", "")


def test_path_may_be_longer_than_one_argument(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text("import sys; print(sys.argv[1:], len(sys.path), len(sys.path[0]))")
    path = [*(f"/nowhere/{number:0200}" for number in range(1200)), *sys.path, str(tmp_path)]
    monkeypatch.setattr(sys, "path", path)
    done = subprocess.run(python_command("job", "a", "b"), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"['a', 'b'] {len(path)} 209\n", "")
