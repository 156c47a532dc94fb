"""TCP store in which replicas meet before they exchange: hosting, connecting, and waiting for a count."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import ConfigError, LaunchError, first_line

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import Store, TCPStore
else:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.002  # between polls of a count; short compared with the time in which a group forms


def host_store(host: str, port: int, timeout: float) -> TCPStore:
    """Host a store where replicas meet. Operations may take `timeout` seconds; port 0 chooses a free one."""
    try:
        # Bound here and not by TCPStore, so that a port in use is reported at once and in one line.
        family = socket.getaddrinfo(host, None)[0][0]  # IPv4 or IPv6
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    actual = listener.getsockname()[1]
    return TCPStore(
        host,
        actual,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def address_of(interface: str) -> str:
    """Return the address of a network interface of this machine, such as eth0; IPv4 is preferred."""
    by_name = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if addresses:
            by_name[name] = min(addresses, key=lambda entry: entry.family != socket.AF_INET).address
    if interface not in by_name:
        raise ConfigError(
            f"launcher.interface={interface}: must be an interface of {socket.gethostname()} that has an address:"
            f" {', '.join(by_name)}"
        )
    return by_name[interface]


def connect(context: ReplicaContext, timeout: float) -> TCPStore:
    """Connect to the store in which the replicas meet; with `context.hosts_store`, host it until this process ends.

    Connecting, and every later operation on the store, may take `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    try:
        if context.hosts_store:
            _keep_open(context.host, context.port, limit)
        return TCPStore(context.host, context.port, wait_for_workers=False, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error


@functools.cache  # other ranks may still use the store when this one needs it no more
def _keep_open(host: str, port: int, timeout: timedelta) -> TCPStore:
    # Other stores of this process at the same port, such as the default process group's, share the server.
    return TCPStore(host, port, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=timeout)


def cannot_join(context: ReplicaContext, error: Exception) -> LaunchError:
    return LaunchError(
        f"rank {context.rank} of {context.num_replicas} could not join the others at"
        f" {context.host}:{context.port}: {first_line(error)}"
    )


class PeersMissingError(ValueError):
    """Replicas that are not at the meeting point."""


class StoreConnection:
    """Caches the connection to the latest group's store: connecting may take seconds if DNS is slow."""

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._store: TCPStore | None = None

    def connect(self, context: ReplicaContext, timeout: float) -> TCPStore | None:
        """Return the store, hosted elsewhere, where a group's replicas meet; None if they need no store."""
        if context.num_replicas == 1 or context.segment:
            return None
        address = (context.host, context.port)
        if self._store is None or self._address != address:
            self._store = None
            self._store, self._address = connect(context, timeout), address
        self._store.set_timeout(timedelta(seconds=timeout))
        return self._store


def wait_for_all(store: Store, key: str, count: int, timeout: float, is_abandoned: Callable[[], bool]) -> None:
    """Wait up to `timeout` seconds, or until `is_abandoned`, for a store's counter to reach `count`."""
    deadline = time.monotonic() + timeout
    while (num_arrived := store.add(key, 0)) < count:
        if is_abandoned() or time.monotonic() > deadline:
            why = "" if is_abandoned() else f" within {timeout:g} s"
            raise PeersMissingError(f"{count - num_arrived} of them did not join{why}")
        time.sleep(POLL_SECONDS)
