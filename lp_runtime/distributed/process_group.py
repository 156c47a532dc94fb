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

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.store import cannot_join, connect, wait_for_all
from lp_runtime.distributed.transport.collectives import CollectiveTransport
from lp_runtime.distributed.transport.group import CPU, Group
from lp_runtime.distributed.transport.machines import MachinesTransport, this_machine
from lp_runtime.distributed.transport.shared_memory import SharedMemoryTransport, why_unavailable
from lp_runtime.distributed.transport.transport import Transport
from lp_runtime.errors import LaunchError

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import PrefixStore, Store
else:
    from torch.distributed import PrefixStore, Store

log = logging.getLogger(__name__)

REFUSAL = "!"  # before the reason why a replica cannot share memory


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
    with environment(variables):
        yield


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that a library reads for the duration of a `with` block."""
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
        backend: "shared", "nccl", "gloo", or "auto": shared memory inside a machine, and gloo between machines; where
            each replica has a machine of its own, NCCL on GPUs and gloo on CPUs.
        interface: Network interface to exchange over; None for the backend's own choice.
        machine: Name that the replicas of this machine have in common; None for what the system says.
    """

    timeout: float
    step_timeout: float | None = None
    backend: str = "auto"
    interface: str | None = None
    machine: str | None = None

    @property
    def may_share(self) -> bool:
        """Whether replicas of one machine exchange over shared memory, if they can."""
        return self.backend in ("auto", "shared")

    def shares_memory(self, num_replicas: int) -> bool:
        """Whether replicas that are all on this machine exchange over shared memory.

        Args:
            num_replicas: R.

        Raises:
            LaunchError: if they must and cannot.
        """
        reason = why_unavailable(num_replicas) if self.may_share else None
        if reason is not None and self.backend == "shared":
            raise LaunchError(f"launcher.backend=shared: {reason}")
        return self.may_share and reason is None


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
        transport: Transport = _share(context.segment, context.rank, context.num_replicas, options, is_abandoned)
    else:
        transport = _meet(context, device, options, store, is_abandoned)
    try:
        yield Group.over(transport, context.rank, context.num_replicas)
    finally:
        transport.close()


def _share(
    segment: str, rank: int, num_replicas: int, options: GroupOptions, is_abandoned: Callable[[], bool]
) -> SharedMemoryTransport:
    """Join a group over shared memory; raises LaunchError if it does not form."""
    step_timeout = options.step_timeout or options.timeout
    return SharedMemoryTransport(segment, rank, num_replicas, options.timeout, step_timeout, is_abandoned)


def _meet(
    context: ReplicaContext,
    device: torch.device,
    options: GroupOptions,
    store: Store | None,
    is_abandoned: Callable[[], bool],
) -> Transport:
    """Meet the other replicas in a store, find out who is on which machine, and join the group.

    Raises:
        LaunchError: If the group does not form in time.
    """
    rank, num_replicas = context.rank, context.num_replicas
    try:
        store = store or connect(context, options.timeout)
        group_store = PrefixStore(_join(context, store, options.timeout, is_abandoned), store)
        machines = _machines(context, options, group_store) if options.may_share else list(range(num_replicas))
        num_machines = len(set(machines))
        if num_machines == num_replicas:
            return _connect(rank, num_replicas, device, options, group_store, is_abandoned)
        if rank == 0:
            group_store.set("segment", new_segment_name())
        segment = group_store.get("segment").decode()
        if num_machines == 1:
            return _share(segment, rank, num_replicas, options, is_abandoned)
        here = [each for each, machine in enumerate(machines) if machine == machines[rank]]
        local = None
        if len(here) > 1:
            local = _share(f"{segment}-{here[0]}", here.index(rank), len(here), options, is_abandoned)
        leaders = None
        if rank == here[0]:
            leaders = _connect(machines[rank], num_machines, CPU, options, group_store, is_abandoned)
        return MachinesTransport(rank, machines, local, leaders)
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error


def _machines(context: ReplicaContext, options: GroupOptions, store: Store) -> list[int]:
    """Agree with the other replicas on who can share memory with whom.

    Args:
        context: Rank of this replica, and number of replicas.
        options: Whether memory must be shared.
        store: The group's own.

    Returns:
        Number of each rank's machine, 0, 1 ... as they first appear. One that cannot share memory counts as a machine.

    Raises:
        LaunchError: If all must share memory and cannot.
    """
    reason = why_unavailable(context.num_replicas)
    mine = f"{REFUSAL}{context.rank} {reason}" if reason else options.machine or this_machine()
    store.set(f"machine/{context.rank}", mine)
    names = [store.get(f"machine/{rank}").decode() for rank in range(context.num_replicas)]
    order = list(dict.fromkeys(names))
    refusal = next((name.partition(" ")[2] for name in order if name.startswith(REFUSAL)), None)
    if options.backend == "shared":
        _check_shared(refusal, len(order))
    elif refusal and context.rank == 0:
        log.warning("launcher.backend=auto: memory cannot be shared (%s); going on over the network", refusal)
    return [order.index(name) for name in names]


def _check_shared(refusal: str | None, num_machines: int) -> None:
    """Raise LaunchError if replicas of some machines cannot share memory, of which one may have said why."""
    if refusal or num_machines > 1:
        why_not = refusal or f"the replicas are on {num_machines} machines"
        raise LaunchError(f"launcher.backend=shared: {why_not}")


def new_segment_name() -> str:
    """Return a name for the shared memory of a group, which no other group has."""
    return f"lp_runtime-{secrets.token_hex(8)}"


def _connect(
    rank: int,
    size: int,
    device: torch.device,
    options: GroupOptions,
    store: Store,
    is_abandoned: Callable[[], bool],
) -> CollectiveTransport:
    """Form a process group of torch.distributed.

    Args:
        rank: This process's place in it.
        size: Number of its processes.
        device: On which tensors are; decides between NCCL and gloo where the options do not.
        options: Timeouts, backend and network interface.
        store: The group's own.
        is_abandoned: True ends the wait for the others.
    """
    backend = "nccl" if options.backend == "nccl" or (options.backend == "auto" and device.type == "cuda") else "gloo"
    step_timeout = options.step_timeout or options.timeout
    with _settings(options.interface):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=step_timeout),
            device_id=device if backend == "nccl" else None,  # NCCL connects at once
        )
    # A replica that leaves at once would close connections that a slower one is still making. A store that is gone, or
    # a replica that never gets that far, shows in the exchange.
    store.add("formed", 1)
    with contextlib.suppress(RuntimeError, ValueError):
        wait_for_all(store, "formed", size, options.timeout, is_abandoned)
    return CollectiveTransport(backend, rank, device, step_timeout, store)


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


def num_processes() -> int:
    """Return the processes of the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.cache
def _torchruns_store(context: ReplicaContext, timeout: float) -> Store:
    """Return the store of torchrun's ranks, connected to once: connecting may take seconds, and calls are many.

    Raises:
        LaunchError: If the store cannot be reached.
    """
    return connect(context, timeout)
