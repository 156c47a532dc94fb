"""Tests that the commands in the headers of launch/ run verbatim on this machine's CPUs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.processes import PATIENCE, marked
from support.ray_head import RAY, free_ports, head_node

from lp_runtime.errors import LaunchError
from lp_runtime.launchers.ray_connection import connect

LAUNCH = Path(__file__).parents[2] / "launch"
# Settings for this machine, appended to those of the header; with them nothing is measured at start.
FIXED = ["lookahead.W=5", "lookahead.N=3", "lookahead.G=5", "lookahead.prior=none"]
SMALL = ["device=cpu", "dtype=float32", "max_new_tokens=8", "eos=false", *FIXED]


def commands(name: str) -> list[list[str]]:
    """Return the words of each command in a file's header: its indented lines without their explanations."""
    lines = [line[1:] for line in (LAUNCH / name).read_text().splitlines() if line.startswith("#")]
    text = "\n".join(line for line in lines if line.startswith("   ")).replace("\\\n", " ")
    return [shlex.split(re.split(r"\s{3,}", line.strip())[0]) for line in text.splitlines()]


def split_variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into its leading variables and the remaining words."""
    count = next(place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


@pytest.mark.slow
def test_torchrun_commands_run_on_two_nodes():
    actual = [split_variables(words) for words in commands("torchrun.sh")]
    two = [(variables, words) for variables, words in actual if variables.get("NNODES") == "2"]
    assert len(two) == 2
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "NPROC": "1", "PYTHON": sys.executable}
    with marked() as mark:
        nodes = []
        for variables, (script, *arguments) in two:
            command = [LAUNCH.parent / script, *arguments, *SMALL]
            environment = mark.environment | variables | here
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            nodes.append(subprocess.Popen(command, env=environment, cwd=LAUNCH.parent, **pipes))
        (text, summary), (other, _) = (node.communicate(timeout=PATIENCE) for node in nodes)
        assert [node.returncode for node in nodes] == [0, 0], summary
        assert text.startswith("def fib(n):") and "2 replicas on cpu" in summary and not other
        mark.assert_gone()


def test_slurm_starts_torchrun_on_every_node(tmp_path):
    """Slurm's commands and Python are replaced by stubs."""
    for name, body in (("scontrol", "echo node0; echo node1"), ("srun", 'shift 2; SLURM_NODEID=1 exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (command,) = commands("slurm.sbatch")
    arguments = command[command.index("launch/slurm.sbatch") :]
    slurm = {"SLURM_SUBMIT_DIR": LAUNCH.parent, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    environment = os.environ | slurm | {"SLURM_JOB_ID": "7", "NPROC": "4", "PYTHON": "echo"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(["bash", *arguments], cwd=LAUNCH.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 20007 --nproc-per-node 4"
    assert expected in done.stdout and done.stdout.endswith(" ".join(arguments[1:]) + "\n")


def test_ray_accepts_the_cluster_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    assert ["ray", "up", "launch/ray_cluster.yaml"] in commands("ray_cluster.yaml")
    validate_config(prepare_config(yaml.safe_load((LAUNCH / "ray_cluster.yaml").read_text())))


@pytest.fixture(scope="module")
def token_cluster(tmp_path_factory):
    """Yield a cluster that `ray start --head` starts for a user with a token, as Ray 2.60 makes one."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("a1" * 32)
    start = next(words for words in commands("ray_job.sh") if words[0] == "ray")
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", unset)
        cache = os.environ["NUMBA_CACHE_DIR"]
        with head_node([RAY, *start[1:]], HOME=str(home), NUMBA_CACHE_DIR=cache) as head:
            head.environment["RAY_API_SERVER_ADDRESS"] = head.dashboard
            yield head


def submit(cluster, **variables: str) -> subprocess.CompletedProcess:
    """Submit the header's job to a cluster."""
    script, *arguments = next(words for words in commands("ray_job.sh") if words[0] == "launch/ray_job.sh")
    environment = cluster.environment | {"JOB_PYTHON": sys.executable} | variables
    command = [LAUNCH.parent / script, *arguments, "gpus=2", *SMALL]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)


@pytest.mark.slow
def test_ray_job_finds_the_users_token(token_cluster):
    done = submit(token_cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 replicas on cpu" in done.stdout and "succeeded" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"RAY_AUTH_TOKEN": "b2" * 32}, {"RAY_AUTH_MODE": "disabled"}])
def test_ray_job_with_wrong_or_no_token_is_refused_in_one_line(token_cluster, variables):
    done = submit(token_cluster, **variables)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: the Ray cluster at {token_cluster.dashboard} cannot be used: ")
    assert line.endswith("; set RAY_AUTH_TOKEN to the token of the cluster")


def test_dead_cluster_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for address in (None, "auto"):
        with pytest.raises(LaunchError, match="no Ray cluster at RAY_ADDRESS=127.0.0.1:1: Connection refused"):
            connect(address)


@pytest.mark.slow
def test_driver_with_wrong_token_is_refused(token_cluster, monkeypatch):
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b2" * 32}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"{token_cluster.address} asks for another token: set RAY_AUTH_TOKEN"):
        connect(token_cluster.address)


@pytest.mark.slow
def test_driver_finds_the_users_token(token_cluster):
    address = f"launcher.address={token_cluster.address}"
    command = [sys.executable, "-m", "lp_runtime", "prompt=def f():", "launcher=ray", "gpus=2", address, *SMALL]
    done = subprocess.run(command, env=token_cluster.environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "2 replicas on cpu" in done.stderr, done.stderr
