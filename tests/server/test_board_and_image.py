"""Tests of launch/: the board shows existing metrics; the image's commands, files and checks work."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime, Scheduler
from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.metrics import Metrics
from lp_runtime.server.serve import StartingServer

LAUNCH = Path(__file__).parents[2] / "launch"
BOARD = json.loads((LAUNCH / "grafana.json").read_text())
DOCKERFILE = (LAUNCH / "Dockerfile").read_text()
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


@pytest.fixture(scope="module")
def runtime(small_demo_dir):
    lookahead = LookaheadConfig(7, 5, 7, prior="none")
    with LookaheadRuntime(small_demo_dir, device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def metrics(runtime) -> dict[str, set[str]]:
    """Return the names of a server's samples after a request, with the labels of each."""
    with Scheduler(runtime) as scheduler:
        scheduler.stream("def f(", 4).result()
        text = Metrics("demo", runtime, scheduler, (), {429: 1}).text().decode()
    results: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            results.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return results


def test_grafana_board_shows_exactly_the_existing_metrics(metrics):
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"\blp_\w+", expression)}
    assert shown <= metrics.keys()

    def family(name: str) -> str:
        return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)

    assert {family(name) for name in shown} == {family(name) for name in metrics}


def test_grafana_board_uses_existing_labels(metrics):
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\blp_\w+", target["expr"])
            labels = set(re.findall(r"by \((\w+)\)", target["expr"])) | set(
                re.findall(r"{{(\w+)}}", target["legendFormat"])
            )
            assert all(labels <= metrics[name] for name in names), panel["title"]
            assert target["expr"].count('{model_name=~"$model"}') == len(names)


def lines_of(instruction: str) -> list[str]:
    """Return the arguments of every Dockerfile line with an instruction; continued lines are joined."""
    return re.findall(rf"^{instruction} (.*)", DOCKERFILE.replace("\\\n", ""), re.M)


def test_image_entrypoint_user_and_volume_are_valid():
    for entrypoint in lines_of("ENTRYPOINT"):
        command, *settings = json.loads(entrypoint)
        config = load_config(ServeConfig, settings)
        assert (command, config.host, config.port) == ("lp-serve", "0.0.0.0", 8000)
    # Kubernetes' runAsNonRoot needs a numeric user.
    assert len(lines_of("ENTRYPOINT")) == 2 and lines_of("USER") == ["1000", "1000"]
    assert lines_of("VOLUME") == ["/home/app/.cache"] * 2


def test_files_copied_into_the_image_exist():
    sources = [source for line in lines_of("COPY") for source in line.split()[:-1]]
    assert "pyproject.toml" in sources and all((LAUNCH.parent / source).exists() for source in sources)


def test_commands_of_the_image_build_are_valid():
    extras = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed, compiling = [], 0
    for line in lines_of("RUN"):
        command, *arguments = shlex.split(line)
        if command == "pip":
            installed += re.findall(r"\.\[(.*)\]", line)
        elif command == "lp-generate":
            config = load_config(GenerateConfig, arguments)
            assert config.device == "cpu" and config.gpus == 2 and config.constraint is not None  # compiles everything
            compiling += 1
    assert installed == ["serve,constraints"] * 2 and set(installed[0].split(",")) <= extras.keys()
    assert compiling == 4  # twice in each image: the second command has its drafter


def health(*arguments: object) -> tuple[int, str]:
    """Run the image's health check for an lp-serve command line; return its exit status and message."""
    command = [sys.executable, LAUNCH / "healthcheck.py", "lp-serve", "port=8000", *map(str, arguments)]
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9"}  # which Docker may set; it must not be asked
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stderr.strip()


def test_health_check_fails_while_loading_or_unreachable():
    assert re.findall(r'CMD \["python", "/app/(.*)"\]', DOCKERFILE) == ["healthcheck.py"]
    starting = StartingServer(socket.create_server(("127.0.0.1", 0)), ServeConfig())
    url = f"http://127.0.0.1:{starting.port}/health"
    assert health(f"port={starting.port}") == (1, f"{url}: HTTP Error 503: Service Unavailable")
    starting.hand_over().close()
    assert health(f"port={starting.port}") == (1, f"{url}: <urlopen error [Errno 111] Connection refused>")


@pytest.mark.parametrize(
    ("host", "asked"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("[::]", "[::1]"), ("::1", "[::1]"), ("127.0.0.2", "127.0.0.2")],
)
def test_health_check_asks_the_servers_host(host, asked):
    assert health(f"host={host}", "port=1")[1].startswith(f"http://{asked}:1/health: ")


def test_health_check_passes_on_a_running_server(runtime):
    with served(runtime) as (url, _):
        assert health(f"port={url.rpartition(':')[2]}") == (0, "")


def test_health_check_accepts_a_certificate_of_another_name(tmp_path):
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *key, "-days", "1", "-subj", "/CN=example.com"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    config = ServeConfig(ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem"))
    starting = StartingServer(socket.create_server(("127.0.0.1", 0)), config)
    status, message = health(f"port={starting.port}", f"ssl_certfile={tmp_path / 'cert.pem'}")
    assert status == 1 and message.startswith("https://") and message.endswith("HTTP Error 503: Service Unavailable")
    starting.hand_over().close()
