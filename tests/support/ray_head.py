"""A Ray cluster of one node, isolated from other clusters on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray

from support.processes import Marked, marked, wait_until

RAY = str(Path(sys.executable).with_name("ray"))


class Head(Marked):
    """The node's processes, and the cluster's addresses."""

    address: str
    dashboard: str


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@contextmanager
def head_node(
    command: Sequence[str] = (RAY, "start", "--head"), has_dashboard: bool = True, **environment: str
) -> Iterator[Head]:
    """Start a node on its own ports and in its own folder; its processes are killed at the end.

    Only jobs need the dashboard and the monitors, whose processes take several seconds of CPU time to start.
    """
    folder = tempfile.mkdtemp(prefix="lpr", dir="/tmp")  # short: Ray puts sockets in it
    port, dashboard, client, agent = free_ports(4)  # Ray's defaults may be in use by another cluster
    with marked(RAY_TMPDIR=folder, **environment) as mark:
        command = [*command, "--block", "--node-ip-address=127.0.0.1", f"--port={port}"]
        command += [f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}", f"--temp-dir={folder}"]
        command += [f"--dashboard-agent-listen-port={agent}", "--num-cpus=2", "--num-gpus=0"]
        command += ["--disable-usage-stats", "--object-store-memory=100000000"]
        command += [f"--include-dashboard={str(has_dashboard).lower()}"]
        if not has_dashboard:
            command += ["--include-log-monitor=false", "--no-monitor"]
        with open(f"{folder}/head.log", "w") as log:
            head = subprocess.Popen(command, env=mark.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            read_log = Path(log.name).read_text
            wait_until(lambda: "Ray runtime started." in read_log(), read_log)
            if has_dashboard:
                wait_until(lambda: answers(f"http://127.0.0.1:{dashboard}/api/jobs/"), read_log)
            mark.address, mark.dashboard = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
            yield mark
        finally:
            ray.shutdown()
            mark.kill()  # all at once: a process that outlives its parent could not be found
            head.wait()
            shutil.rmtree(folder, ignore_errors=True)


def answers(url: str) -> bool:
    """Whether a server answers, even with an error, such as a missing token."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
