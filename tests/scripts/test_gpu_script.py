"""Tests of scripts/gpu.sh: its commands, its output files, and parts that fail or take too long."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from support.thinned import thinned

from lp_runtime.config.commands import BenchConfig
from lp_runtime.config.overrides import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu.sh"
CALL_SECONDS = 540
# A fake python that records its arguments. It reports one GPU, and copies the built-in prompts.
NOTING = """#!/bin/sh
case "$*" in
*device_count*) echo 1; exit ;;
*OWN_PROMPTS*)
    exec cp {prompts} "$3" ;;
esac
for each in "$@"; do printf '%s\\0' "$each"; done >> {noted}
echo >> {noted}
"""


def write_prompts(file: Path) -> None:
    """Write the built-in prompts with the script's own code.

    The code runs once and in this process, because it imports torch.
    """
    written = r'^own_prompts\(\) \{\n    "\$python" -c "\n(.*?)" "\$work/'
    (code,) = re.findall(written, SCRIPT.read_text(), re.DOTALL | re.MULTILINE)
    if not file.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["-c", str(file)])
            exec(code)


@pytest.fixture
def script(tmp_path, tmp_path_factory):
    """Return a function that runs the script with the fake python.

    It returns the arguments that each part recorded, and the process.
    """
    python, noted = tmp_path / "python", tmp_path / "noted"
    prompts = tmp_path_factory.getbasetemp() / "prompts.jsonl"
    write_prompts(prompts)
    python.write_text(NOTING.format(noted=noted, prompts=prompts))
    python.chmod(0o755)
    (tmp_path / "models" / "7b").mkdir(parents=True)
    for name in ("7b", "real"):
        (tmp_path / "models" / name).mkdir(exist_ok=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")

    def call(*arguments: str, **environment: str) -> tuple[list[list[str]], subprocess.CompletedProcess]:
        whole = {
            name: value for name, value in os.environ.items() if name not in ("SIZE", "PROMPTS", "SITE", "LP_GPUS")
        }
        whole |= {"PYTHON": str(python), "MODELS": str(tmp_path / "models"), **environment}
        done = subprocess.run([SCRIPT, tmp_path / "out", *arguments], env=whole, capture_output=True, text=True)
        lines = noted.read_text().splitlines() if noted.exists() else []
        return [line.split("\0")[:-1] for line in lines], done

    return call


def check_study(arguments: list[str]) -> None:
    """Check that a command line of benchmarks/ names an existing study and has valid arguments."""
    command, study, *rest = arguments
    assert re.search(rf"\b{study}\b", (ROOT / command).read_text())
    module = importlib.import_module(f"studies.{'step_time' if study == 'step' else study}")
    parser = ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.add_argument("--output")
    parser.parse_args(rest)


@pytest.mark.parametrize(("call", "size"), thinned(5, ["A", "B", "C", "D", "all"], ["", "tiny"]))
def test_commands_of_every_part_are_valid(script, call, size, monkeypatch):
    for folder in ("benchmarks", "scripts"):
        monkeypatch.syspath_prepend(ROOT / folder)
    noted, done = script(call, **({"SIZE": size} if size else {}))
    assert done.returncode == 0, done.stderr
    assert len(noted) >= {"B": 4, "D": 2, "all": 15}.get(call, 5)  # B's model exists already
    for arguments in noted:
        if arguments[0] == "experiments/inflate_model.py":
            assert (ROOT / arguments[0]).exists() and arguments[1] == "--from"
        elif arguments[0].startswith("benchmarks/"):
            check_study(arguments)
        elif arguments[:2] == ["-m", "torch.distributed.run"]:
            check_study(arguments[arguments.index("benchmarks/speed.py") :])
        elif arguments[0] == "-c":
            assert "bench_main()" in arguments[1]
            load_config(BenchConfig, arguments[2:])
        else:
            paths = [each.partition("::")[0] for each in arguments if each.startswith("tests/")]
            assert arguments[:2] == ["-m", "pytest"] and all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize(("gpus", "replicas"), [(2, ["2"]), (8, ["2", "8"])])
def test_parts_run_with_two_and_with_all_gpus(script, gpus, replicas, monkeypatch):
    """Parts run with two replicas and with all, and no number is repeated."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    parts = ("equality", "ranks", "kills", "parallel", "splits", "tensor_parallel")
    noted, done = script("all", *parts, LP_GPUS=str(gpus))
    assert done.returncode == 0, done.stderr
    equality, ranks, kills, parallel, splits, tensor_parallel = noted
    for arguments, expected in ((equality, ["1", *replicas]), (ranks, ["1", *replicas]), (kills, replicas)):
        check_study(arguments)
        start = arguments.index("--gpus") + 1
        end = next(at for at in range(start, len(arguments)) if arguments[at].startswith("-"))
        assert arguments[start:end] == expected
    check_study(tensor_parallel[tensor_parallel.index("benchmarks/speed.py") :])
    assert tensor_parallel[tensor_parallel.index("--nproc-per-node") + 1] == str(gpus)
    assert all(load_config(BenchConfig, each[2:]).gpus == gpus for each in (parallel, splits))


def test_time_limits_of_a_call_fit_into_nine_minutes():
    """The time limits of a call's parts add up to at most the limit of the call."""
    for call in "ABCD":
        (parts,) = re.findall(rf"^    {call}\) echo (.*) ;;", SCRIPT.read_text(), re.M)
        assert sum(int(part.split(":")[1]) for part in parts.split()) <= CALL_SECONDS


def test_next_part_runs_after_a_failed_part(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh
case "$*" in
*device_count*) echo 1 ;;
*machine*) echo a row; exit 7 ;;
*floor*) mkdir -p "$4"; echo '{
 "rows": [1]}' > "$4/floor.json"; echo another row ;;
esac
"""
    )
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "MODELS": str(tmp_path / "models")}
    command = [SCRIPT, tmp_path / "out", "A", "machine", "floor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip() == "failed: machine"
    printed = (tmp_path / "out" / "A.txt").read_text()
    assert "a row\n" in printed and "machine failed with status 7" in printed and "another row\n" in printed
    assert json.loads((tmp_path / "out" / "A.jsonl").read_text()) == {"rows": [1]}
    assert len(list((tmp_path / "out").iterdir())) == 2  # the device machine returns at most eight files


def test_part_is_killed_after_its_time_limit(tmp_path):
    """A part is ended with all processes that it started; a copy of the script limits it to one second."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    copy = folder / "gpu.sh"
    copy.write_text(SCRIPT.read_text().replace("machine:30", "machine:1"))
    copy.chmod(0o755)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *device_count*) echo 1 ;; *) sleep 1000 ;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "MODELS": str(tmp_path / "models")}
    done = subprocess.run([copy, tmp_path / "out", "A", "machine"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "machine failed with status 124" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("E",), "call=E: must be A, B, C, D or all"),
        (("A", "exchange"), "part=exchange: must be one of machine:30"),
        ((), "scripts/gpu.sh OUT A"),
    ],
)
def test_unknown_calls_and_parts_are_refused(script, arguments, says):
    _, done = script(*arguments)
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated GPU needs g++")
def test_gpu_tests_pass_on_a_simulated_gpu():
    """A few GPU tests pass on a simulated GPU.

    Nothing else runs them on a machine without a GPU, and call A ends its tests at the first failure.
    """
    site = os.pathsep.join([str(ROOT / "tests/support/simulated_site"), os.environ.get("PYTHONPATH", "")])
    names = "longer_text or waits_once or without_a_mask or (captured_passes and float32)"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-p", "no:cacheprovider", "tests/gpu", "-k", names]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": site}, capture_output=True, text=True)
    assert done.returncode == 0 and "SKIPPED" not in done.stdout, done.stdout
