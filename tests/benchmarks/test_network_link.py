"""Tests of the link between two network namespaces: it delivers packets, and drops them when cut."""

from __future__ import annotations

import socket

import pytest
from support.benchmarks import command
from support.processes import PATIENCE, wait_until

command("common.py")  # makes the studies importable
link_study = pytest.importorskip("studies.network_link")


@pytest.fixture
def link():
    try:
        with link_study.Link() as link:
            yield link
    except link_study.LinkError as error:
        pytest.skip(str(error))


def test_link_delivers_and_drops_packets(link):
    sockets = []
    for side in range(2):
        with link.entered(side):
            sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sockets[side].bind((f"10.77.0.{side + 1}", 9000))
            sockets[side].settimeout(PATIENCE)
    here, there = sockets
    address = there.getsockname()
    for delay, loss in ((0.0, 0.0), (1.0, 0.0)):
        link.delay_ms, link.loss = delay, loss
        here.sendto(b"first", address)
        assert there.recv(100) == b"first"
    for is_cut, loss in ((True, 0.0), (False, 1.0)):
        link.is_cut, link.loss = is_cut, loss
        num_lost = link.num_lost
        here.sendto(b"lost", address)
        wait_until(lambda num_lost=num_lost: link.num_lost > num_lost)
    link.heal()
    here.sendto(b"last", address)
    assert there.recv(100) == b"last"
    for each in sockets:
        each.close()
