"""Tests of launcher.interface: the exchange uses the named interface, and an unknown one is refused."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest
from support.forked import forking, next_result
from support.ranks import CPU, TIMEOUT, interfaces

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.process_group import GroupOptions, process_group
from lp_runtime.distributed.store import address_of, host_store
from lp_runtime.entrypoints.cli import main
from lp_runtime.errors import ConfigError

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def exchange_over(rank: int, names: list[str], port: int, results) -> None:
    """Run a rank that forms a group over each interface in turn and reports its connections' addresses."""
    os.environ["GLOO_SOCKET_IFNAME"] = "none"  # the user's value; the setting takes precedence and does not change it
    for number, name in enumerate(names):
        context = ReplicaContext(rank, 2, host="127.0.0.1", port=port, attempt=number)
        with process_group(context, CPU, GroupOptions(TIMEOUT, backend="gloo", interface=name)) as group:
            gather_rows(np.array([rank]), group)
            peers = [
                (connection.laddr.ip, connection.raddr.ip)
                for connection in psutil.Process().net_connections("tcp")
                if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port != port
            ]
        results.put((name, peers, [os.environ.get(variable) for variable in NAMES]))


@pytest.mark.slow
def test_exchange_uses_the_named_interface():
    names = interfaces()
    assert "lo" in names
    results = forking().Queue()
    store = host_store("127.0.0.1", 0, TIMEOUT)
    processes = [
        forking().Process(target=exchange_over, args=(rank, names, store.port, results), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        for _ in range(2 * len(names)):
            name, peers, environment = next_result(results, processes)
            assert peers and set(peers) == {(address_of(name), address_of(name))}
            assert environment == ["none", None]
    finally:
        for process in processes:
            process.join(TIMEOUT)
            process.kill()


def test_address_of_returns_address_and_refuses_unknown_interface():
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"^launcher.interface=eth99: must be an interface of .*: .*lo"):
        address_of("eth99")


@pytest.mark.parametrize("gpus", [1, 2])
def test_unknown_interface_is_refused_before_the_model_is_loaded(tiny_model_dir, capsys, gpus, monkeypatch):
    monkeypatch.setattr("lp_runtime.replica.loading.load_model", None)
    with pytest.raises(SystemExit) as ended:
        main([f"model.path={tiny_model_dir}", "prompt=[1]", "ids=true", f"gpus={gpus}", "launcher.interface=eth99"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: launcher.interface=eth99: must be an interface of ")
