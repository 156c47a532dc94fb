"""Tests of scripts/setup.sh: which Python makes the environment, warnings on a machine with a GPU, and two at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("bash", "cat", "cksum", "dirname", "flock", "head", "rm")  # what it runs, except stubs
# A fake Python, suitable or not, that copies itself into a new environment and installs nothing.
PYTHON = """#!/bin/sh
case "$*" in
*ensurepip*) exit {suits} ;;
*"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
*"version(\\"torch\\")"*) echo {torch} ;;
*get_path*) echo {include} ;;
*-dev*) echo python3.12-dev ;;
esac
"""


class Machine:
    """A copy of the script in an empty repository, and a PATH with only stubs."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.include = folder / "repository", folder / "bin", folder / "include"
        for each in (self.root / "scripts", self.bin, self.include):
            each.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            (self.root / name).touch()
        for name in NEEDED:
            (self.bin / name).symlink_to(shutil.which(name))
        for name in ("mkdir", "cp"):
            (self.bin / name).symlink_to(shutil.which(name))
        self.add_python()

    def add(self, name: str, text: str = "#!/bin/sh\n") -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def add_python(self, suits: bool = True, torch: str = "2.13.0") -> None:
        self.add("python3", PYTHON.format(suits=int(not suits), torch=torch, include=self.include))

    def add_gpu(self, driver: str) -> None:
        self.add("nvidia-smi", f"#!/bin/sh\necho {driver}\necho {driver}\n")

    def start(self, **environment: str) -> subprocess.Popen:
        command = [self.bin / "bash", self.root / "scripts" / "setup.sh"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env={"PATH": str(self.bin)} | environment, **pipes)

    def set_up(self, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(**environment)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def warnings(self, **environment: str) -> list[str]:
        done = self.set_up(**environment)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith("warning: ")]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_machine_without_gpu_gets_no_warning(machine):
    assert machine.warnings() == []
    assert machine.set_up().stderr == ""  # the environment exists already


def test_warnings_name_old_driver_missing_compiler_and_headers(machine):
    machine.add_gpu("550.54.15")
    driver, compiler, headers = machine.warnings()
    assert "driver is 550.54.15, and torch needs 580 or newer: update the driver" in driver
    assert "no C compiler" in compiler and "install gcc" in compiler
    assert f"{machine.include} has no Python.h" in headers and "install python3.12-dev" in headers


@pytest.mark.parametrize("compiler", ["cc", "gcc", "clang", "mine"])
def test_complete_gpu_machine_gets_no_warning(machine, compiler):
    machine.add_gpu("580.65.06")
    machine.add(compiler)
    (machine.include / "Python.h").touch()
    assert machine.warnings(**({"CC": "mine -m64"} if compiler == "mine" else {})) == []


def test_cuda_12_torch_accepts_an_older_driver(machine):
    machine.add_python(torch="2.13.0+cu126")
    machine.add_gpu("550.54.15")
    assert not any("driver" in line for line in machine.warnings())


def test_failing_nvidia_smi_gives_no_driver_warning(machine):
    machine.add("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert not any("driver" in line for line in machine.warnings())


def test_uv_creates_the_environment_if_python_is_too_old(machine):
    machine.add_python(suits=False)
    copied = f'mkdir -p "$6/bin"; cp {machine.bin}/python3 "$6/bin/python"'
    machine.add("uv", f'#!/bin/sh\n[ "$*" = "venv --quiet --seed --python 3.12 $6" ] && {copied}\n')
    done = machine.set_up()
    assert done.returncode == 0 and "with uv and Python 3.12" in done.stderr
    assert (machine.root / ".venv" / "bin" / "python").exists()


def test_error_without_python_and_uv_names_how_to_install_them(machine):
    machine.add_python(suits=False)
    done = machine.set_up()
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "no Python 3.11 or newer" in line
    assert "apt-get install python3.11-venv" in line and "astral.sh/uv/install.sh" in line


def test_waits_for_another_set_up_of_the_checkout(machine):
    lock = os.open(machine.root, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = machine.start()
    assert process.stderr.readline().startswith("waiting until another scripts/setup.sh has made")
    assert not (machine.root / ".venv").exists()
    os.close(lock)
    process.communicate(timeout=60)
    assert process.returncode == 0 and (machine.root / ".venv" / "bin" / "python").exists()
    fcntl.flock(lock := os.open(machine.root, os.O_RDONLY), fcntl.LOCK_EX)
    assert machine.set_up().stderr == ""  # the environment exists already
    os.close(lock)
