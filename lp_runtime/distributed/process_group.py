"""Forms the process group in which replicas exchange."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.group import CPU, Group
from lp_runtime.errors import ConfigError, LaunchError, first_line

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore

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


@contextmanager
def _over(interface: str | None) -> Iterator[None]:
    """Have process groups that are formed inside this context use a network interface; None for the backend's choice.

    gloo and NCCL read the interface from environment variables only, which are restored at the end.
    """
    if interface is None:
        yield
        return
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # without = a prefix, for NCCL
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class GroupOptions:
    """How a process group is formed, and how long its replicas wait for one another.

    Attributes:
        timeout: Seconds within which all replicas must have joined.
        step_timeout: Seconds after which a peer that does not answer is an error; None for `timeout`.
        backend: "nccl", "gloo", or "auto": NCCL on GPUs, gloo on CPUs.
        interface: Network interface to exchange over; None for the backend's own choice.
    """

    timeout: float
    step_timeout: float | None = None
    backend: str = "auto"
    interface: str | None = None


def never_abandoned() -> bool:
    """Default of `process_group`: the wait for peers goes on until the timeout."""
    return False


@contextmanager
def process_group(
    context: ReplicaContext,
    device: torch.device,
    options: GroupOptions,
    store: Store | None = None,
    is_abandoned: Callable[[], bool] = never_abandoned,
) -> Iterator[Group]:
    """Join the process group of all replicas, and leave it at the end; a single replica needs none.

    Args:
        context: Rank of this replica, number of replicas, and where they meet.
        device: Device of this replica's model.
        options: Timeouts, backend and network interface.
        store: Store in which the replicas meet; None to open the one that `context` names.
        is_abandoned: Called while peers are waited for; true ends the wait.

    Yields:
        The group of all replicas.

    Raises:
        LaunchError: If the group does not form in time, or the backend does not support the device.
    """
    backend = _chosen_backend(options.backend, device)
    group = Group(context.rank, context.num_replicas, device if backend == "nccl" else CPU)
    if group.is_alone:
        yield group
        return
    try:
        if store is None:
            store = _open_store(context, options.timeout)
        number = _join(context, store, options.timeout, is_abandoned)
        with _over(options.interface):
            dist.init_process_group(
                backend,
                store=PrefixStore(f"{_group_name(context)}/{number}", store),
                rank=context.rank,
                world_size=context.num_replicas,
                timeout=timedelta(seconds=options.step_timeout or options.timeout),
                device_id=device if backend == "nccl" else None,  # NCCL connects at once
            )
        formed = f"{_group_name(context)}/{number}/formed"
        store.add(formed, 1)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {context.rank} of {context.num_replicas} could not join the others at"
            f" {context.host}:{context.port}: {first_line(error)}"
        ) from error
    try:
        yield group
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a broken group may not even end well; what broke it matters
            dist.destroy_process_group()
        raise
    # A replica that leaves at once would close connections that a slower one is still making. A store that is gone, or
    # a replica that never gets that far, is no reason not to leave.
    with contextlib.suppress(RuntimeError, ValueError):
        _wait_for_all(store, formed, context.num_replicas, options.timeout, is_abandoned)
    dist.destroy_process_group()


def _chosen_backend(backend: str, device: torch.device) -> str:
    """Return "nccl" or "gloo" for a backend setting.

    Args:
        backend: "auto", "nccl" or "gloo".
        device: Device of this replica's model.

    Raises:
        LaunchError: If NCCL is asked for without a GPU.
    """
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError(f"launcher.backend=nccl: this replica is on {device.type}")
    return backend


def _open_store(context: ReplicaContext, timeout: float) -> TCPStore:
    """Connect to the store in which the replicas meet; open the store first where `context` says so.

    Args:
        context: Address of the store, and whether this process hosts it.
        timeout: Seconds that connecting, and every later operation on the store, may take.
    """
    return TCPStore(
        context.host,
        context.port,
        is_master=context.hosts_store,
        multi_tenant=True,  # a second group of the same processes shares the first one's
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def _group_name(context: ReplicaContext) -> str:
    """Return the prefix of the store's keys that groups of one size and one start of the replicas share."""
    return f"lp_runtime/{context.attempt}/{context.num_replicas}"


def _join(context: ReplicaContext, store: Store, timeout: float, is_abandoned: Callable[[], bool]) -> int:
    """Wait until every replica has come to the store; forming the process group itself is short then.

    Args:
        context: Number of replicas and which start of them it is.
        store: Store in which the replicas meet.
        timeout: Seconds to wait.
        is_abandoned: True ends the wait.

    Returns:
        Number of groups with the same prefix that the replicas formed in this store before.

    Raises:
        ValueError: If replicas are missing when the wait ends.
    """
    # Keys of an earlier group in the same store would be taken for this one's. No rank forms its next group
    # before all have formed this one, so the count of those that came tells which group this is.
    key, num_replicas = f"{_group_name(context)}/joined", context.num_replicas
    number = (store.add(key, 1) - 1) // num_replicas
    _wait_for_all(store, key, (number + 1) * num_replicas, timeout, is_abandoned)
    return number


def _wait_for_all(store: Store, key: str, count: int, timeout: float, is_abandoned: Callable[[], bool]) -> None:
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


@contextmanager
def existing_or_new_group(device: torch.device, timeout: float) -> Iterator[Group]:
    """Use the default process group of torchrun's ranks, or form one and leave it at the end.

    Args:
        device: Device of this rank's model.
        timeout: Seconds that a new group may take to form, and that its ranks wait for one another.

    Yields:
        The group of all ranks.

    Raises:
        LaunchError: If a new group does not form in time.
    """
    if dist.is_initialized():
        on_device = "nccl" in str(dist.get_backend_config()) and device.type == "cuda"
        yield Group(dist.get_rank(), dist.get_world_size(), device if on_device else CPU)
        return
    with process_group(ReplicaContext.from_torchrun(), device, GroupOptions(timeout)) as group:
        yield group
