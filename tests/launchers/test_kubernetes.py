"""Tests that serve.yaml's settings, ports, probes and times agree, and that manifests fit the schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.http.gate import PROBES

LAUNCH = Path(__file__).parents[2] / "launch"
KUBERNETES_VERSIONS = ("1.31", "1.34")
MANIFESTS = ["kuberay.yaml", "kubernetes/rayservice.yaml", "kubernetes/serve.yaml"]
PARTS = {part["kind"]: part for part in yaml.safe_load_all((LAUNCH / "kubernetes" / "serve.yaml").read_text())}
DEPLOYMENT = PARTS["Deployment"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(CONTAINER,) = POD["containers"]


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    """Return the settings that the container runs with: the image's, then the manifest's."""
    _, entrypoint = re.findall(r"^ENTRYPOINT (.*)", (LAUNCH / "Dockerfile").read_text(), re.M)
    return load_config(ServeConfig, [*json.loads(entrypoint)[1:], *CONTAINER["args"]])


def schema_documents(document: dict) -> Iterator[dict]:
    """Yield a document of Kubernetes' own API, or the pods of a KubeRay cluster."""
    if document["apiVersion"] != "ray.io/v1":
        yield document
        return
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec") or spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", **group["template"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_match_the_kubernetes_schemas(name, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((LAUNCH / name).read_text()):
        for each in schema_documents(document):
            kubernetes_validate.validate(each, version, strict=True)


def test_every_gpu_of_the_pod_is_used(config):
    assert int(CONTAINER["resources"]["limits"]["nvidia.com/gpu"]) == config.gpus and config.device == "cuda"


def test_service_and_network_policy_use_the_port_of_lp_serve(config):
    (port,) = CONTAINER["ports"]
    assert (port["containerPort"], config.host) == (config.port, "0.0.0.0")
    assert [each["targetPort"] for each in PARTS["Service"]["spec"]["ports"]] == [port["name"]]
    (rule,) = PARTS["NetworkPolicy"]["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port["name"]]


def test_all_selectors_match_the_pods():
    labels = DEPLOYMENT["template"]["metadata"]["labels"].items()
    selectors = [DEPLOYMENT["selector"], PARTS["PodDisruptionBudget"]["spec"]["selector"]]
    selectors += [{"matchLabels": PARTS["Service"]["spec"]["selector"]}, PARTS["NetworkPolicy"]["spec"]["podSelector"]]
    assert all(selector["matchLabels"].items() <= labels for selector in selectors)


def test_probes_allow_for_the_start_timeout(config):
    def seconds(probe: dict) -> float:
        assert probe["httpGet"]["path"] in PROBES and probe["httpGet"]["port"] == "http"
        return probe["periodSeconds"] * probe["failureThreshold"]

    start = seconds(CONTAINER["startupProbe"])
    assert start > config.launcher.start_timeout and DEPLOYMENT["progressDeadlineSeconds"] > start
    assert seconds(CONTAINER["livenessProbe"]) > config.launcher.start_timeout  # a replica may restart meanwhile
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready" and seconds(CONTAINER["readinessProbe"]) <= 10


def test_optional_probe_generates_at_each_call_within_its_timeout(config):
    text = (LAUNCH / "kubernetes" / "serve.yaml").read_text()
    (comment,) = re.findall(r"((?: +# [^\n]*\n)+) +lifecycle:", text)
    argument = re.search(r"health_interval=\d+", comment)[0]
    probe = yaml.safe_load(re.sub(r"^ +# ", "", comment[comment.index("# livenessProbe") - 1 :], flags=re.M))
    probe = probe["livenessProbe"]
    config = load_config(ServeConfig, [*CONTAINER["args"], argument])
    assert probe["httpGet"] == {"path": "/health_generate", "port": "http"}
    assert config.health_interval < probe["periodSeconds"] and config.health_timeout < probe["timeoutSeconds"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > config.launcher.start_timeout


def test_grace_period_covers_pre_stop_and_shutdown_timeout(config):
    _, sleep = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["terminationGracePeriodSeconds"] > int(sleep) + config.shutdown_timeout


def test_every_path_is_on_a_volume(config):
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in CONTAINER["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    (cache,) = set(re.findall("^VOLUME (.*)", (LAUNCH / "Dockerfile").read_text(), re.M))
    assert mounts[cache]["persistentVolumeClaim"]["claimName"] == PARTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert "secret" in mounts[str(Path(config.api_keys).parent)] and config.api_key is None
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] and "/tmp" in mounts
    assert any(Path(config.model.path).is_relative_to(mount) for mount in mounts)
    assert POD["securityContext"]["runAsUser"] == 1000  # the image's user
