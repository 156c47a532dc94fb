"""Forming the process group: how the replicas find one another."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.errors import ConfigError, LaunchError, first_line

POLL_SECONDS = 0.002


def host_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Open the store that replicas meet in. `port` 0 takes a free one: see `.port` of the result. `timeout` in seconds.

    Raises:
        LaunchError: if the port is taken or the host is not this machine.
    """
    try:
        # Bound here, not in the store, so that a port that is taken is an error at once and in one line.
        listener = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    actual = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        actual,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def address_of(interface: str) -> str:
    """The address of a network interface of this machine; of several, the first IPv4 one.

    Raises:
        ConfigError: if there is no such interface, or it has no address; names those that will do.
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
    """Groups that are formed meanwhile use this interface: gloo and NCCL take it from the environment only."""
    if interface is None:
        yield
        return
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # without = a prefix, for NCCL
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def process_group(
    context: ReplicaContext,
    device: torch.device,
    timeout: float,
    store: dist.Store | None = None,
    backend: str = "auto",
    step_timeout: float | None = None,
    is_abandoned: Callable[[], bool] = lambda: False,
    interface: str | None = None,
) -> Iterator[torch.device]:
    """Join the process group of all replicas; there is none for a single replica.

    Args:
        context: who this replica is and where to meet.
        device: the replica's device.
        timeout: seconds within which all must have come.
        store: where to meet, if it is open in this process already.
        backend: "nccl", "gloo", or "auto": NCCL on GPUs, gloo without.
        step_timeout: seconds after which a peer that does not answer is an error; as `timeout` if not given.
        is_abandoned: asked while peers are waited for: whether not to wait any longer.
        interface: network interface to exchange over; if not given, the backend chooses.

    Yields:
        the device on which the backend wants its tensors.

    Raises:
        LaunchError: if the group does not form in time, or the backend is not for the device.
    """
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError(f"launcher.backend=nccl: this replica is on {device.type}")
    exchange_device = device if backend == "nccl" else torch.device("cpu")
    if context.num_replicas == 1:
        yield exchange_device
        return
    limit, step_limit = timedelta(seconds=timeout), timedelta(seconds=step_timeout or timeout)
    try:
        if store is None:
            store = dist.TCPStore(
                context.host,
                context.port,
                is_master=context.hosts_store,
                multi_tenant=True,  # a second group of the same processes shares the first one's
                wait_for_workers=False,
                timeout=limit,
            )
        # Keys of an earlier group in the same store would be taken for this one's. No rank forms its next group
        # before all have formed this one, so the count of those that came tells which group this is.
        name = f"lp_runtime/{context.attempt}/{context.num_replicas}"
        number = (store.add(f"{name}/joined", 1) - 1) // context.num_replicas
        # Waited for here, where the wait can be ended, so that forming the group itself is short.
        deadline = time.monotonic() + timeout
        while (num_joined := store.add(f"{name}/joined", 0)) < (number + 1) * context.num_replicas:
            if is_abandoned() or time.monotonic() > deadline:
                missing = (number + 1) * context.num_replicas - num_joined
                raise ValueError(f"{missing} of them did not come{'' if is_abandoned() else f' within {timeout:g} s'}")
            time.sleep(POLL_SECONDS)
        with _over(interface):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"{name}/{number}", store),
                rank=context.rank,
                world_size=context.num_replicas,
                timeout=step_limit,
                device_id=device if backend == "nccl" else None,  # NCCL connects at once
            )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {context.rank} of {context.num_replicas} could not join the others at"
            f" {context.host}:{context.port}: {first_line(error)}"
        ) from error
    try:
        yield exchange_device
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a broken group may not even end well; what broke it matters
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def existing_or_new_group(device: torch.device, timeout: float) -> Iterator[tuple[ReplicaContext, torch.device]]:
    """The group of torchrun's ranks: the default process group if there is one already, else one for the while.

    Args:
        device: this rank's.
        timeout: seconds, of a new group.

    Yields:
        (context, exchange device): who this rank is, and where the group's backend wants its tensors.

    Raises:
        LaunchError: see `process_group`.
    """
    if dist.is_initialized():
        context = ReplicaContext(dist.get_rank(), dist.get_world_size())
        on_device = "nccl" in str(dist.get_backend_config()) and device.type == "cuda"
        yield context, device if on_device else torch.device("cpu")
        return
    context = ReplicaContext.from_torchrun()
    with process_group(context, device, timeout) as exchange_device:
        yield context, exchange_device
