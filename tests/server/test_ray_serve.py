"""Tests of lp-serve server=ray_serve: the same routes via Ray Serve, on a cluster it starts and ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from types import SimpleNamespace

import openai
import pytest
from support import reference
from support.processes import RAY_SETTINGS, marked, wait_until

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import ConfigError
from lp_runtime.server.ray_serve import Service, build

pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'lp-runtime[ray-serve]'")

COMMAND = [sys.executable, "-c", "from lp_runtime.entrypoints.cli import serve_main; serve_main()", "server=ray_serve"]
SETTINGS = ["device=cpu", "dtype=float32", "lookahead.W=7", "lookahead.N=5", "lookahead.G=7", "lookahead.prior=none"]
PROMPT = reference.PROMPTS[1]


@pytest.mark.slow
def test_ray_serve_answers_streams_and_cancels_on_disconnect(tmp_path):
    with LookaheadRuntime(device="cpu", dtype="float32", lookahead=LookaheadConfig(7, 5, 7, prior="none")) as runtime:
        expected = runtime.generate(PROMPT, 48, eos=False).text
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="lpr", dir="/tmp")  # short: Ray puts sockets in it
    with marked(RAY_TMPDIR=folder, **RAY_SETTINGS) as mark:
        mark.environment.pop("RAY_ADDRESS", None)
        process = subprocess.Popen(
            [*COMMAND, *SETTINGS, f"port={port}", "api_key=secret"],
            cwd=tmp_path,
            env=mark.environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout.readline() == f"serving demo_model on http://127.0.0.1:{port}/v1\n"

        def figures() -> dict[str, str]:
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read() == b'{"status":"ok","replicas":1}'
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)
        asked = {"model": "demo_model", "prompt": PROMPT, "temperature": 0, "extra_body": {"ignore_eos": True}}
        assert client.completions.create(max_tokens=48, **asked).choices[0].text == expected
        asked["extra_body"]["lookahead"] = {"W": 0, "N": 2, "G": 0}  # else the answer is copied in very few steps
        chunks = list(client.completions.create(max_tokens=48, stream=True, **asked))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected and len(chunks) > 3
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="guess").models.list()
        with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
            client.completions.create(**asked | {"prompt": ""})
        stream = client.completions.create(max_tokens=2000, stream=True, **asked)
        assert next(iter(stream)).choices[0].text  # arrives while the rest is still being decoded
        wait_until(lambda: figures()['lp_requests_running{model_name="demo_model"}'] == "1.0")
        stream.close()
        wait_until(lambda: figures()['lp_requests_running{model_name="demo_model"}'] == "0.0")
        assert figures()['lp_requests_total{model_name="demo_model",outcome="cancelled"}'] == "1.0"
        process.send_signal(signal.SIGINT)
        process.wait()
        mark.assert_gone()
    shutil.rmtree(folder, ignore_errors=True)


def test_application_settings_are_composed_and_checked():
    application = build({"gpus": 2, "model.path": "/m", "lookahead.pool_from_prompt": False, "max_new_tokens": None})
    (config,) = application._bound_deployment.init_args
    assert isinstance(config, ServeConfig) and (config.gpus, config.model.path) == (2, "/m")
    assert config.launcher.name == "ray" and not config.lookahead.pool_from_prompt and config.max_new_tokens is None
    with pytest.raises(ConfigError, match="unknown setting nonsense=1"):
        build({"nonsense": 1})
    with pytest.raises(ConfigError, match="launcher=local: must be ray with server=ray_serve"):
        build({"launcher": "local"})
    with pytest.raises(ConfigError, match="port=0: must be 1 to 65535 with server=ray_serve"):
        build({"port": 0})
    with pytest.raises(ConfigError, match="ssl_certfile=cert.pem: not with server=ray_serve, whose proxies would"):
        build({"ssl_certfile": "cert.pem"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_keys": "/none/keys"}, "api_keys=/none/keys: No such file or directory"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: 'tools' is no variable of the chat template"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_serve_replica_checks_settings_before_it_loads_the_model(monkeypatch, settings, message):
    """`serve run` and `serve deploy` start the application without lp-serve, which checks them, too."""
    monkeypatch.setattr(LookaheadRuntime, "from_config", None)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(Service.__init__(SimpleNamespace(), ServeConfig(server="ray_serve", **settings)))
    assert message in str(caught.value)
