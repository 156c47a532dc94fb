"""Tests that the files of launch/ match this package's commands and the pinned versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from torch.distributed.run import get_args_parser

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "launch" / "kuberay.yaml").read_text()
SERVICE = (ROOT / "launch" / "kubernetes" / "rayservice.yaml").read_text()
RAY_VERSION = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


class Manifest:
    """A RayJob or a RayService, and the settings of the command that it runs.

    Attributes:
        policy: the NetworkPolicy of its pods.
        groups: the head's and the workers' groups, each with its `pod` and that pod's only `container`.
    """

    def __init__(self, text: str, kind: str):
        documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
        assert documents[kind]["apiVersion"] == "ray.io/v1"
        spec = documents[kind]["spec"]
        self.text, self.policy = text, documents["NetworkPolicy"]["spec"]
        if kind == "RayJob":
            python, option, module, *overrides = spec["entrypoint"].split()
            assert (python, option, module) == ("python", "-m", "lp_runtime")
            self.config = load_config(GenerateConfig, overrides)
            self.cluster = spec["rayClusterSpec"]
        else:
            (application,) = ServeDeploySchema(**yaml.safe_load(spec["serveConfigV2"])).applications
            assert application.import_path == "lp_runtime.server.ray_serve:build"
            overrides = [f"{key}={value}" for key, value in application.args.items()]
            self.config = load_config(ServeConfig, ["server=ray_serve", "launcher=ray", *overrides])
            self.cluster = spec["rayClusterConfig"]
        self.groups = [self.cluster["headGroupSpec"], *self.cluster["workerGroupSpecs"]]
        for group in self.groups:
            group["pod"] = group["template"]["spec"]
            (group["container"],) = group["pod"]["containers"]

    def paths(self, group: dict) -> list[str]:
        """Return the paths that the pods of a group must see."""
        is_head, config = group is self.groups[0], self.config
        if isinstance(config, ServeConfig):
            return [] if is_head else [config.model.path, config.cache_dir, config.api_keys]
        return [config.model.path, config.cache_dir, *([config.prompts, config.output] if is_head else [])]


@pytest.fixture(scope="module", params=["RayJob", "RayService"])
def manifest(request) -> Manifest:
    return Manifest(TEXT if request.param == "RayJob" else SERVICE, request.param)


def test_command_uses_ray_and_cuda(manifest):
    assert manifest.config.launcher.name == "ray" and manifest.config.device == "cuda"


def test_worker_gpus_add_up_to_the_replicas(manifest):
    head, *workers = manifest.groups
    limits = [group["container"]["resources"]["limits"] for group in workers]
    num_gpus = [int(limit["nvidia.com/gpu"]) for limit in limits]
    assert sum(group["replicas"] * num for group, num in zip(workers, num_gpus, strict=True)) == manifest.config.gpus
    assert "nvidia.com/gpu" not in head["container"]["resources"]["limits"]
    assert manifest.config.launcher.placement == "pack" and min(num_gpus) > 1  # NVLink inside a pod
    for group in workers:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_ray_versions_match_the_constraints(manifest):
    assert manifest.cluster["rayVersion"] == RAY_VERSION
    assert {group["container"]["image"].rpartition("ray-")[2] for group in manifest.groups} == {RAY_VERSION}
    assert re.search(r"FROM rayproject/ray:([\d.]+)-", manifest.text)[1] == RAY_VERSION


def test_every_path_is_on_a_volume_of_its_pod(manifest):
    for group in manifest.groups:
        volumes = {volume["name"]: volume for volume in group["pod"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in group["container"]["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        for path in manifest.paths(group):
            assert any(Path(path).is_relative_to(mount) for mount in mounts), path


def test_dashboard_requires_a_token_and_stays_in_the_cluster(manifest):
    cluster = manifest.cluster
    assert cluster["authOptions"] == {"mode": "token"} and cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    selector = manifest.policy["podSelector"]["matchLabels"].items()
    for group in manifest.groups:
        assert selector <= group["template"]["metadata"]["labels"].items()
    for rule in manifest.policy["ingress"]:
        assert "from" in rule or [each["port"] for each in rule["ports"]] == [8000]  # the API's port


def test_commented_lp_serve_command_matches_its_service_port():
    comment = "\n".join(line[4:] for line in TEXT.splitlines() if line.startswith("#   "))
    entrypoint, service = re.search(
        r"^(entrypoint: .*?)\n(apiVersion: v1.*)", comment, re.DOTALL | re.MULTILINE
    ).groups()
    command, *overrides = yaml.safe_load(entrypoint)["entrypoint"].split()
    config = load_config(ServeConfig, overrides)
    (port,) = yaml.safe_load(service)["spec"]["ports"]
    assert (command, config.port, config.host) == ("lp-serve", port["targetPort"], "0.0.0.0")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"standalone": True, "nproc_per_node": "2", "max_restarts": 0}),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MAX_RESTARTS": "3"},
            {"nnodes": "2", "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 29511, "max_restarts": 3},
        ),
        (
            {"NNODES": "1:4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29600"},
            {"nnodes": "1:4", "rdzv_backend": "c10d", "rdzv_endpoint": "10.0.0.1:29600", "rdzv_id": "lp_runtime"},
        ),
    ],
)
def test_torchrun_script_passes_options_from_variables(variables, expected):
    environment = os.environ | {"PYTHON": "echo", "NPROC": "2"} | variables
    script = [ROOT / "launch" / "torchrun.sh", "prompt=x", "gpus=2"]
    words = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    options = vars(get_args_parser().parse_args(words[2:]))
    assert {name: options[name] for name in expected} == expected
    command = [options["training_script"], *options["training_script_args"]]
    assert options["module"] and command == ["lp_runtime", "prompt=x", "gpus=2"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NPROC": "0"}, "NPROC=0: must be a number from 1 to 999999"),
        ({"NPROC": "two"}, "NPROC=two: must be a number from 1 to 999999"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1: must be a number from 0 to 999999"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: must be a number from 1 to 65535"),
        ({"NNODES": "x"}, "NNODES=x: must be a number from 1 to 999999, or two as MIN:MAX"),
        ({"NNODES": "3:2"}, "NNODES=3:2: must be a number from 1 to 999999, or two as MIN:MAX"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2: must be a number from 0 to 1"),
    ],
)
def test_torchrun_script_refuses_a_variable_out_of_range(variables, message):
    script = ["bash", ROOT / "launch" / "torchrun.sh", "prompt=x"]
    done = subprocess.run(script, env=os.environ | {"PYTHON": "echo"} | variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        ("torchrun.sh", {"NNODES": "2", "MASTER_ADDR": "x"}, "NODE_RANK: must be given: which of the NNODES machines"),
        ("torchrun.sh", {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: must be given: the address of machine 0"),
        ("torchrun.sh", {"NNODES": "1:2"}, "MASTER_ADDR: must be given: the address of the machine where all meet"),
        ("slurm.sbatch", {}, "submit this file with sbatch"),
    ],
)
def test_missing_variable_ends_a_launch_script_in_one_line(script, variables, message):
    command = ["bash", ROOT / "launch" / script, "prompt=x"]
    environment = os.environ | {"PYTHON": "echo", "NPROC": "2"} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("script", ["torchrun.sh", "ray_job.sh", "slurm.sbatch"])
def test_bad_setting_ends_a_launch_script_in_one_line(script):
    """Nothing is started or uploaded: there are no Slurm commands and no Ray cluster here."""
    environment = os.environ | {"PYTHON": sys.executable, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2"}
    command = ["bash", ROOT / "launch" / script, "prompt=x", "lookahaed.W=3"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown setting lookahaed.W=3: did you mean lookahead.W?\n"


def test_ray_job_says_why_the_cluster_cannot_be_used(tmp_path):
    """Also if no line of Ray's output looks like an error of Python."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "ray").write_text("#!/bin/sh\necho 'no such command' >&2; exit 1\n")
    (tmp_path / "ray").chmod(0o755)
    variables = {
        "PYTHON": "none",
        "RAY_API_SERVER_ADDRESS": "http://here:1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = ["bash", tmp_path / "launch" / "ray_job.sh", "prompt=x"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    expected = "error: the Ray cluster at http://here:1 cannot be used: no such command\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("printf 'node-a\\nnode-b\\n'", (0, "node-a of 2", "")),
        ("echo 'scontrol: error: no controller' >&2; exit 1", (1, "", "scontrol: error: no controller\n")),
    ],
    ids=["answers", "fails"],
)
def test_slurm_job_names_its_first_node_or_ends_with_slurms_error(tmp_path, command, expected):
    for name, text in (("scontrol", command), ("srun", 'echo "$MASTER_ADDR of $NNODES"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n"}
    environment = os.environ | slurm | {"PYTHON": "true", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", ROOT / "launch" / "slurm.sbatch", "prompt=x"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == expected
