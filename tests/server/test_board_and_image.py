"""launch/: the board shows metrics that exist, the image's settings are settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lp_runtime import LookaheadConfig, LookaheadRuntime, Scheduler
from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.metrics import Metrics

LAUNCH = Path(__file__).parents[2] / "launch"
BOARD = json.loads((LAUNCH / "grafana.json").read_text())
DOCKERFILE = (LAUNCH / "Dockerfile").read_text()
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


@pytest.fixture(scope="module")
def metrics(demo_model_dir) -> dict[str, set[str]]:
    """Names of a server's samples after a request, each with its labels."""
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with (
        LookaheadRuntime(demo_model_dir, device="cpu", dtype="float32", lookahead=lookahead) as runtime,
        Scheduler(runtime) as scheduler,
    ):
        scheduler.stream("def f(", 4).result()
        text = Metrics("demo", runtime, scheduler, ()).text().decode()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_the_board_shows_every_metric_and_no_other(metrics):
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"\blp_\w+", expression)}
    assert shown <= metrics.keys()

    def family(name: str) -> str:
        return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)

    assert {family(name) for name in shown} == {family(name) for name in metrics}


def test_the_boards_labels_exist(metrics):
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\blp_\w+", target["expr"])
            labels = set(re.findall(r"by \((\w+)\)", target["expr"])) | set(
                re.findall(r"{{(\w+)}}", target["legendFormat"])
            )
            assert all(labels <= metrics[name] for name in names), panel["title"]
            assert target["expr"].count('{model_name=~"$model"}') == len(names)


def test_the_images_settings():
    entries = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in re.findall("^ENTRYPOINT .*", DOCKERFILE, re.M)]
    assert len(entries) == 2 and all(entry[0] == "lp-serve" for entry in entries)
    for entry in entries:
        config = load_config(ServeConfig, entry[1:])
        assert (config.host, config.port) == ("0.0.0.0", 8000)
    assert "127.0.0.1:8000/ready" in DOCKERFILE and DOCKERFILE.count("USER lp") == 2
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M)
    assert all((LAUNCH.parent / name).exists() for line in copied for name in line.split())
