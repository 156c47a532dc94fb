"""Forms the group in which replicas exchange, over shared memory or a process group of torch.distributed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lp_runtime.distributed.collectives import CollectiveTransport
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.group import CPU, Group
from lp_runtime.distributed.shared_memory import SharedMemoryTransport, why_unavailable
from lp_runtime.distributed.store import cannot_join, connect, wait_for_all
from lp_runtime.distributed.transport import Transport
from lp_runtime.errors import LaunchError

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import PrefixStore, Store
else:
    from torch.distributed import PrefixStore, Store

log = logging.getLogger(__name__)

REFUSAL = "!"  # before the reason why rank 0 has chosen no segment


@contextmanager
def _settings(interface: str | None) -> Iterator[None]:
    """Have process groups that are formed inside this context work as a group needs.

    gloo and NCCL read these settings from environment variables only, which are restored at the end.

    Args:
        interface: network interface to use; None for the backend's choice.
    """
    # torch's watchdog of NCCL would end the process when a peer is lost; CollectiveTransport.wait notices by itself.
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    if interface is not None:
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # without = a prefix
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
        backend: "shared", "nccl", "gloo", or "auto": shared memory on one machine, else NCCL on GPUs and gloo on CPUs.
        interface: Network interface to exchange over; None for the backend's own choice.
    """

    timeout: float
    step_timeout: float | None = None
    backend: str = "auto"
    interface: str | None = None

    def shares_memory(self, num_replicas: int) -> bool:
        """Whether replicas that are all on this machine exchange over shared memory. That they cannot is logged.

        Args:
            num_replicas: R.

        Raises:
            LaunchError: if they must and cannot.
        """
        if self.backend not in ("auto", "shared") or (self.backend == "auto" and self.interface is not None):
            return False
        reason = why_unavailable(num_replicas)
        if reason is not None and self.backend == "shared":
            raise LaunchError(f"launcher.backend=shared: {reason}")
        if reason is not None:
            log.warning("launcher.backend=auto: memory cannot be shared (%s); going on without", reason)
        return reason is None


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
    """Join the group of all replicas, and leave it at the end; a single replica needs none.

    Args:
        context: Rank of this replica, number of replicas, and where they meet.
        device: Device of this replica's model.
        options: Timeouts, backend and network interface.
        store: Store in which the replicas meet; None to open the one that `context` names, if they need one.
        is_abandoned: Called while peers are waited for; true ends the wait.

    Yields:
        The group of all replicas.

    Raises:
        LaunchError: If the group does not form in time, or the backend does not support the device.
    """
    if options.backend == "nccl" and device.type != "cuda":
        raise LaunchError(f"launcher.backend=nccl: this replica is on {device.type}")
    if context.num_replicas == 1:
        yield Group.alone(device if options.backend in ("nccl", "auto") else CPU)
        return
    if context.segment:
        transport: Transport = _share(context.segment, context, options, is_abandoned)
    else:
        transport = _meet(context, device, options, store, is_abandoned)
    try:
        yield Group.over(transport, context.rank, context.num_replicas)
    finally:
        transport.close()


def _share(
    segment: str, context: ReplicaContext, options: GroupOptions, is_abandoned: Callable[[], bool]
) -> SharedMemoryTransport:
    """Join a group over shared memory; raises LaunchError if it does not form."""
    step_timeout = options.step_timeout or options.timeout
    return SharedMemoryTransport(
        segment, context.rank, context.num_replicas, options.timeout, step_timeout, is_abandoned
    )


def _meet(
    context: ReplicaContext,
    device: torch.device,
    options: GroupOptions,
    store: Store | None,
    is_abandoned: Callable[[], bool],
) -> Transport:
    """Meet the other replicas in a store, agree with them on a transport, and join the group over it.

    Raises:
        LaunchError: If the group does not form in time.
    """
    if options.backend == "shared" and not context.is_one_machine:
        raise LaunchError("launcher.backend=shared: the replicas are on several machines")
    try:
        store = store or connect(context, options.timeout)
        group_store = PrefixStore(_join(context, store, options.timeout, is_abandoned), store)
        segment = _agreed_segment(context, options, group_store) if context.is_one_machine else ""
        if segment:
            return _share(segment, context, options, is_abandoned)
        return _connect_process_group(context, device, options, group_store, is_abandoned)
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error


def _agreed_segment(context: ReplicaContext, options: GroupOptions, store: Store) -> str:
    """Return the name of the segment that rank 0 has chosen for a group on this machine; empty for none.

    Args:
        context: Rank of this replica, and number of replicas.
        options: Backend and network interface.
        store: The group's own.

    Raises:
        LaunchError: If memory must be shared and cannot.
    """
    if context.rank == 0:
        try:
            choice = new_segment_name() if options.shares_memory(context.num_replicas) else ""
        except LaunchError as error:
            choice = f"{REFUSAL}{error}"
        store.set("segment", choice)
    choice = store.get("segment").decode()
    if choice.startswith(REFUSAL):
        raise LaunchError(choice.removeprefix(REFUSAL))
    return choice


def new_segment_name() -> str:
    """Return a name for the shared memory of a group, which no other group has."""
    return f"lp_runtime-{secrets.token_hex(8)}"


def _connect_process_group(
    context: ReplicaContext,
    device: torch.device,
    options: GroupOptions,
    store: Store,
    is_abandoned: Callable[[], bool],
) -> CollectiveTransport:
    """Form a process group of torch.distributed, in a store that is the group's own."""
    backend = "nccl" if options.backend == "nccl" or (options.backend == "auto" and device.type == "cuda") else "gloo"
    step_timeout = options.step_timeout or options.timeout
    with _settings(options.interface):
        dist.init_process_group(
            backend,
            store=store,
            rank=context.rank,
            world_size=context.num_replicas,
            timeout=timedelta(seconds=step_timeout),
            device_id=device if backend == "nccl" else None,  # NCCL connects at once
        )
    # A replica that leaves at once would close connections that a slower one is still making. A store that is gone, or
    # a replica that never gets that far, shows in the exchange.
    store.add("formed", 1)
    with contextlib.suppress(RuntimeError, ValueError):
        wait_for_all(store, "formed", context.num_replicas, options.timeout, is_abandoned)
    return CollectiveTransport(backend, context.rank, device, step_timeout, store)


def _group_name(context: ReplicaContext) -> str:
    """Return the prefix of the store's keys that groups of one size and one start of the replicas share."""
    return f"lp_runtime/{context.attempt}/{context.num_replicas}"


def _join(context: ReplicaContext, store: Store, timeout: float, is_abandoned: Callable[[], bool]) -> str:
    """Wait until every replica has come to the store; forming the process group itself is short then.

    Args:
        context: Number of replicas and which start of them it is.
        store: Store in which the replicas meet.
        timeout: Seconds to wait.
        is_abandoned: True ends the wait.

    Returns:
        Prefix of the keys of this group alone.

    Raises:
        ValueError: If replicas are missing when the wait ends.
    """
    # Keys of an earlier group in the same store would be taken for this one's. No rank forms its next group
    # before all have formed this one, so the count of those that came tells which group this is.
    key, num_replicas = f"{_group_name(context)}/joined", context.num_replicas
    number = (store.add(key, 1) - 1) // num_replicas
    wait_for_all(store, key, (number + 1) * num_replicas, timeout, is_abandoned)
    return f"{_group_name(context)}/{number}"


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
        on_gpu = "nccl" in str(dist.get_backend_config()) and device.type == "cuda"
        backend = "nccl" if on_gpu else "gloo"
        transport = CollectiveTransport(backend, dist.get_rank(), device, timeout, is_ours=False)
        yield Group.over(transport, dist.get_rank(), dist.get_world_size())
        return
    context = ReplicaContext.from_torchrun()
    store = None if context.num_replicas == 1 else _torchruns_store(context, timeout)
    with process_group(context, device, GroupOptions(timeout), store) as group:
        yield group


@functools.cache
def _torchruns_store(context: ReplicaContext, timeout: float) -> Store:
    """Return the store of torchrun's ranks, connected to once: connecting may take seconds, and calls are many.

    Raises:
        LaunchError: If the store cannot be reached.
    """
    return connect(context, timeout)
