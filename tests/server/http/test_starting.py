"""Tests that the port is open while the model loads, and passes to the server without refused clients."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request

import pytest
from support import reference
from support.processes import PATIENCE, wait_until

from lp_runtime import LookaheadConfig, LookaheadRuntime, Scheduler
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import ConfigError
from lp_runtime.server.app import Server
from lp_runtime.server.http.settings import allowed_hosts, listen, read_api_keys
from lp_runtime.server.serve import HttpServer, StartingServer


def status_and_body(url: str, data: bytes | None = None, **options) -> tuple[int, dict]:
    question = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(question, timeout=PATIENCE, **options) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error) | {"retry_after": error.headers["Retry-After"]}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_server_on_all_ipv6_addresses_accepts_ipv4(host):
    config = ServeConfig(host=host, port=0)
    starting = StartingServer(listen(config), config)
    for address in ("127.0.0.1", "[::1]"):
        assert status_and_body(f"http://{address}:{starting.port}/live")[0] == 200
    starting.hand_over().close()


def test_starting_server_answers_503_and_hands_over_its_port():
    config = ServeConfig(port=0)
    starting = StartingServer(listen(config), config)
    port = starting.port
    url = f"http://127.0.0.1:{port}"
    assert status_and_body(f"{url}/live") == (200, {"status": "ok"})
    for path, data in (("/ready", None), ("/health", None), ("/v1/completions", b"{}")):
        status, body = status_and_body(url + path, data)
        assert (status, body["retry_after"]) == (503, "1") and "is starting" in body["error"]["message"]
    listener = starting.hand_over()
    waiting = socket.create_connection(("127.0.0.1", port))  # while no server answers
    waiting.sendall(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    runtime_config = RuntimeConfig(device="cpu", dtype="float32", lookahead=LookaheadConfig(7, 5, 7, prior="none"))
    with LookaheadRuntime.from_config(runtime_config) as runtime, Scheduler(runtime) as scheduler:
        server = HttpServer(Server(runtime, scheduler, config), scheduler, config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        waiting.settimeout(PATIENCE)
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200")
        asked = json.dumps({"prompt": reference.PROMPTS[1], "max_tokens": 4}).encode()
        assert status_and_body(f"{url}/v1/completions", asked)[0] == 200
        server.should_exit = True
        thread.join()
    waiting.close()


def test_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"host=127.0.0.1 port={port}: Address already in use"):
            listen(ServeConfig(port=port))


def test_starting_server_serves_https(tmp_path):
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *key, "-days", "1", "-subj", "/CN=localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost", *files], check=True, capture_output=True)
    config = ServeConfig(port=0, ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem"))
    starting = StartingServer(listen(config), config)
    trust = ssl.create_default_context(cafile=config.ssl_certfile)
    url = f"https://localhost:{starting.port}/live"
    assert status_and_body(url, context=trust) == (200, {"status": "ok"})
    starting.hand_over().close()


def test_silent_connection_does_not_block_the_handover():
    """The real server takes over although a client of the starting one has sent nothing."""
    config = ServeConfig(port=0, header_timeout=10 * PATIENCE)
    starting = StartingServer(listen(config), config)
    with socket.create_connection(("127.0.0.1", starting.port)) as silent:
        silent.settimeout(PATIENCE)
        wait_until(lambda: status_and_body(f"http://127.0.0.1:{starting.port}/live")[0] == 200)
        starting.hand_over().close()
        assert silent.recv(1) == b""


def test_api_keys_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# clients\nfirst alpha\n\nsecond beta\n")
    keys = {"default": "gamma", "first": "alpha", "second": "beta"}
    assert read_api_keys(ServeConfig(api_key="gamma", api_keys=str(path))) == keys
    path.write_text("first alpha\n", encoding="utf-8-sig")
    assert read_api_keys(ServeConfig(api_keys=str(path))) == {"first": "alpha"}
    for text, message in (("one\n", "line 1"), ("a x\na y\n", "line 2"), ("# none\n", "has no key")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_api_keys(ServeConfig(api_keys=str(path)))


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({}, ["localhost", "127.0.0.1", "[::1]"]),
        ({"host": "127.0.0.2"}, ["localhost", "127.0.0.1", "[::1]", "127.0.0.2"]),
        ({"host": "localhost"}, ["localhost", "127.0.0.1", "[::1]"]),
        ({"host": "[::1]"}, ["localhost", "127.0.0.1", "[::1]"]),
        ({"host": "0.0.0.0"}, []),
        ({"host": "my.name"}, []),
        ({"allowed_hosts": ["my.name"]}, ["my.name"]),
        ({"server": "ray_serve"}, []),
    ],
)
def test_allowed_hosts_follow_the_settings(settings, hosts):
    assert allowed_hosts(ServeConfig(**settings)) == hosts
