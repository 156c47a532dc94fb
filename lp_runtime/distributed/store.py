"""The store in which replicas meet before they exchange: opening it, connecting to it, counting in it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.errors import ConfigError, LaunchError, first_line

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import Store, TCPStore
else:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.002  # between looks at who has joined: far below what a group takes to form


def host_store(host: str, port: int, timeout: float) -> TCPStore:
    """Open the store in which replicas meet.

    Args:
        host: Address of this machine to listen on.
        port: Port to listen on; 0 takes a free one, which is the result's `port`.
        timeout: Seconds that an operation on the store may take.

    Raises:
        LaunchError: If the port is taken or the host is not this machine.
    """
    try:
        # Bound here, not in the store, so that a port that is taken is an error at once and in one line.
        listener = socket.create_server((host, port), family=_family(host))
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


def _family(host: str) -> socket.AddressFamily:
    """Return the address family (IPv4 or IPv6) of a host name or address."""
    return socket.getaddrinfo(host, None)[0][0]


def address_of(interface: str) -> str:
    """Return the address of a network interface of this machine; IPv4 before IPv6.

    Args:
        interface: Name of the interface, such as eth0.

    Raises:
        ConfigError: If the interface does not exist or has no address; the message lists the interfaces that have one.
    """
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if addresses:
            found[name] = min(addresses, key=lambda entry: entry.family != socket.AF_INET).address
    if interface not in found:
        raise ConfigError(
            f"launcher.interface={interface}: must be an interface of {socket.gethostname()} that has an address:"
            f" {', '.join(found)}"
        )
    return found[interface]


def connect(context: ReplicaContext, timeout: float) -> TCPStore:
    """Connect to the store in which the replicas meet; open the store first where `context` says so.

    Args:
        context: Address of the store, and whether this process hosts it.
        timeout: Seconds that connecting, and every later operation on the store, may take.

    Raises:
        LaunchError: If the store cannot be reached.
    """
    try:
        return TCPStore(
            context.host,
            context.port,
            is_master=context.hosts_store,
            multi_tenant=True,  # a second group of the same processes shares the first one's
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error


def cannot_join(context: ReplicaContext, error: Exception) -> LaunchError:
    """Return the error that says why a replica could not join its group.

    Args:
        context: The replica's.
        error: What went wrong.
    """
    return LaunchError(
        f"rank {context.rank} of {context.num_replicas} could not join the others at"
        f" {context.host}:{context.port}: {first_line(error)}"
    )


class StoreConnection:
    """Keeps the connection to the latest group's store: connecting may take seconds, where names resolve slowly."""

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._store: TCPStore | None = None

    def connect(self, context: ReplicaContext, timeout: float) -> TCPStore | None:
        """Return the store in which the replicas of a group meet; None if they meet in no store.

        Args:
            context: Address of the store; its process must not host it.
            timeout: Seconds that connecting, and every later operation on the store, may take.

        Raises:
            LaunchError: If the store cannot be reached.
        """
        if context.num_replicas == 1 or context.segment:
            return None
        address = (context.host, context.port)
        if self._store is None or self._address != address:
            self._store = None
            self._store, self._address = connect(context, timeout), address
        return self._store


def wait_for_all(store: Store, key: str, count: int, timeout: float, is_abandoned: Callable[[], bool]) -> None:
    """Wait until a number in a store has grown to a count.

    Args:
        store: holds the number.
        key: of the number; every replica adds 1.
        count: what all replicas make together.
        timeout: seconds to wait.
        is_abandoned: true ends the wait.

    Raises:
        ValueError: if replicas are missing when the wait ends.
    """
    deadline = time.monotonic() + timeout
    while (num_found := store.add(key, 0)) < count:
        if is_abandoned() or time.monotonic() > deadline:
            missing = count - num_found
            raise ValueError(f"{missing} of them did not come{'' if is_abandoned() else f' within {timeout:g} s'}")
        time.sleep(POLL_SECONDS)
