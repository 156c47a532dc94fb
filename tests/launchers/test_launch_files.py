"""launch/: what the manifests ask for is what this package and its versions are."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "launch" / "kuberay.yaml").read_text()
RAY_VERSION = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def job() -> dict:
    found = [document for document in yaml.safe_load_all(TEXT) if document["kind"] == "RayJob"]
    assert len(found) == 1 and found[0]["apiVersion"] == "ray.io/v1"
    return found[0]["spec"]


@pytest.fixture(scope="module")
def config(job) -> GenerateConfig:
    python, option, module, *overrides = job["entrypoint"].split()
    assert (python, option, module) == ("python", "-m", "lp_runtime")
    return load_config(GenerateConfig, overrides)


def groups(job: dict) -> list[dict]:
    """The head's and the workers' groups, with `pod` and its only `container`."""
    cluster = job["rayClusterSpec"]
    found = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in found:
        group["pod"] = group["template"]["spec"]
        (group["container"],) = group["pod"]["containers"]
    return found


def test_the_entrypoint_is_one_that_lp_generate_takes(config):
    assert config.launcher.name == "ray" and config.device == "cuda"


def test_the_gpus_of_all_workers_are_the_replicas(job, config):
    head, *workers = groups(job)
    limits = [group["container"]["resources"]["limits"] for group in workers]
    num_gpus = [int(limit["nvidia.com/gpu"]) for limit in limits]
    assert sum(group["replicas"] * num for group, num in zip(workers, num_gpus, strict=True)) == config.gpus
    assert "nvidia.com/gpu" not in head["container"]["resources"]["limits"]
    assert (config.launcher.placement == "pack") == (len(workers) == workers[0]["replicas"] == 1)
    for group in workers:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_versions_are_those_of_the_constraints(job):
    assert job["rayClusterSpec"]["rayVersion"] == RAY_VERSION
    assert {group["container"]["image"].rpartition("ray-")[2] for group in groups(job)} == {RAY_VERSION}
    assert re.search(r"FROM rayproject/ray:([\d.]+)-", TEXT)[1] == RAY_VERSION


def test_every_path_is_on_a_volume_of_its_pod(job, config):
    head, *workers = groups(job)
    for group in (head, *workers):
        volumes = {volume["name"]: volume for volume in group["pod"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in group["container"]["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        paths = [config.model.path, config.cache_dir, *([config.prompts, config.output] if group is head else [])]
        for path in paths:
            assert any(Path(path).is_relative_to(mount) for mount in mounts), path


def test_the_dashboard_is_not_for_everybody(job):
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    (policy,) = [document for document in yaml.safe_load_all(TEXT) if document["kind"] == "NetworkPolicy"]
    selector = policy["spec"]["podSelector"]["matchLabels"].items()
    for group in groups(job):
        assert selector <= group["template"]["metadata"]["labels"].items()
    assert all(rule["from"] for rule in policy["spec"]["ingress"])


def test_what_is_commented_out_is_taken_by_lp_serve_and_reaches_the_head():
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
def test_what_torchrun_is_told(variables, expected):
    environment = os.environ | {"PYTHON": "echo", "NPROC": "2"} | variables
    script = [ROOT / "launch" / "torchrun.sh", "prompt=x", "gpus=2"]
    words = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    told = vars(get_args_parser().parse_args(words[2:]))
    assert {name: told[name] for name in expected} == expected
    command = [told["training_script"], *told["training_script_args"]]
    assert told["module"] and command == ["lp_runtime", "prompt=x", "gpus=2"]
