"""Forms the group of exchanging replicas, over shared memory or a torch.distributed process group."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lp_runtime.distributed.environment import ReplicaContext, environment
from lp_runtime.distributed.store import cannot_join, connect, wait_for_all
from lp_runtime.distributed.transport.collectives import CollectiveTransport
from lp_runtime.distributed.transport.group import CPU, Group, Transport
from lp_runtime.distributed.transport.machines import MachinesTransport, this_machine
from lp_runtime.distributed.transport.shared_memory import SharedMemoryTransport, why_unavailable
from lp_runtime.errors import LaunchError
from lp_runtime.utils.callables import never

if TYPE_CHECKING:  # torch.distributed has these classes, but does not mark them as exported
    from torch._C._distributed_c10d import PrefixStore, Store
else:
    from torch.distributed import PrefixStore, Store

log = logging.getLogger(__name__)

REFUSAL = "!"  # before the reason why a replica cannot share memory


@contextmanager
def _settings(interface: str | None) -> Iterator[None]:
    """Set the environment variables that configure gloo and NCCL, for groups formed in a `with` block."""
    # torch's NCCL watchdog would end the process if a peer is lost; CollectiveTransport.wait detects that itself.
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    if interface is not None:
        # NCCL takes a name without "=" as a prefix of interface names.
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    with environment(variables):
        yield


@dataclass(frozen=True)
class GroupOptions:
    """Backend, network interface and timeouts of a group.

    The backend is "shared", "nccl", "gloo", or "auto": shared memory inside a machine, and gloo between machines; if
    every replica is on a different machine, NCCL on GPUs and gloo on CPUs.
    """

    timeout: float  # seconds within which all replicas must have joined
    step_timeout: float | None = None  # seconds after which a peer that does not answer is an error; None for `timeout`
    backend: str = "auto"
    interface: str | None = None  # network interface to exchange over; None for the backend's default
    machine: str | None = None  # name shared by replicas that can share memory; None to ask the system

    @property
    def may_share(self) -> bool:
        return self.backend in ("auto", "shared")

    def shares_memory(self, num_replicas: int) -> bool:
        """Whether replicas of this machine exchange over shared memory; LaunchError if they must but cannot."""
        reason = why_unavailable(num_replicas) if self.may_share else None
        if reason is not None and self.backend == "shared":
            raise LaunchError(f"launcher.backend=shared: {reason}")
        return self.may_share and reason is None


@contextmanager
def process_group(
    context: ReplicaContext,
    device: torch.device,
    options: GroupOptions,
    store: Store | None = None,
    is_abandoned: Callable[[], bool] = never,
) -> Iterator[Group]:
    """Join the group of all replicas for the duration of a `with` block, and yield it.

    With `store` None, the replicas meet in the store that `context` names, if they need one. `is_abandoned` is called
    during the wait for peers, and ends it when it returns true. Raises LaunchError if the group does not form.
    """
    if options.backend == "nccl" and device.type != "cuda":
        raise LaunchError(f"launcher.backend=nccl: this replica is on {device.type}")
    if context.num_replicas == 1:
        yield Group.alone()
        return
    if context.segment:
        transport: Transport = _share(context.segment, context.rank, context.num_replicas, options, is_abandoned)
    else:
        transport = _meet(context, device, options, store, is_abandoned)
    try:
        yield Group(context.rank, context.num_replicas, transport)
    finally:
        transport.close()


def _share(
    segment: str, rank: int, num_replicas: int, options: GroupOptions, is_abandoned: Callable[[], bool]
) -> SharedMemoryTransport:
    step_timeout = options.step_timeout or options.timeout
    return SharedMemoryTransport(segment, rank, num_replicas, options.timeout, step_timeout, is_abandoned)


def _meet(
    context: ReplicaContext,
    device: torch.device,
    options: GroupOptions,
    store: Store | None,
    is_abandoned: Callable[[], bool],
) -> Transport:
    """Join a group through a store: agree on each replica's machine, then connect all replicas."""
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
        local = leaders = None
        if len(here) > 1:
            local = _share(f"{segment}-{here[0]}", here.index(rank), len(here), options, is_abandoned)
        try:
            if rank == here[0]:
                leaders = _connect(machines[rank], num_machines, CPU, options, group_store, is_abandoned)
        except BaseException:
            if local is not None:
                local.close()  # tells the other replicas of this machine, which have joined
            raise
        return MachinesTransport(rank, machines, local, leaders)
    except (RuntimeError, ValueError) as error:
        raise cannot_join(context, error) from error


def _machines(context: ReplicaContext, options: GroupOptions, store: Store) -> list[int]:
    """Agree with the other replicas on which of them can share memory.

    Returns the machine number of each rank: 0, 1 ... in order of first appearance. A replica that cannot share memory
    counts as a separate machine.
    """
    reason = why_unavailable(context.num_replicas)
    mine = f"{REFUSAL}{context.rank} {reason}" if reason else options.machine or this_machine()
    store.set(f"machine/{context.rank}", mine)
    names = [store.get(f"machine/{rank}").decode() for rank in range(context.num_replicas)]
    order = list(dict.fromkeys(names))
    refusal = next((name.partition(" ")[2] for name in order if name.startswith(REFUSAL)), None)
    if options.backend == "shared" and len(order) > 1:
        raise LaunchError(f"launcher.backend=shared: {refusal or f'the replicas are on {len(order)} machines'}")
    if refusal and context.rank == 0:
        _warn_unshared(refusal)
    return [order.index(name) for name in names]


@functools.cache  # once per process and reason; groups form often
def _warn_unshared(reason: str) -> None:
    log.warning("launcher.backend=auto: memory cannot be shared (%s); using the network", reason)


def new_segment_name() -> str:
    return f"lp_runtime-{secrets.token_hex(8)}"


def _connect(
    rank: int,
    size: int,
    device: torch.device,
    options: GroupOptions,
    store: Store,
    is_abandoned: Callable[[], bool],
) -> CollectiveTransport:
    """Form the default process group. With backend "auto", `device` decides between NCCL and gloo."""
    backend = "nccl" if options.backend == "nccl" or (options.backend == "auto" and device.type == "cuda") else "gloo"
    step_timeout = options.step_timeout or options.timeout
    with _settings(options.interface):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=step_timeout),
            device_id=device if backend == "nccl" else None,  # makes NCCL connect now, not in the first step
        )
    transport = CollectiveTransport(backend, rank, device, step_timeout, store)
    try:
        # Wait for all: a replica that leaves at once would close connections that a slower one is still making.
        # Failures are ignored, because the exchange detects a lost store or replica.
        with contextlib.suppress(RuntimeError, ValueError):
            store.add("formed", 1)
            wait_for_all(store, "formed", size, options.timeout, is_abandoned)
    except BaseException:
        transport.close()  # torch allows one default group: a later one could not form
        raise
    return transport


def _join(context: ReplicaContext, store: Store, timeout: float, is_abandoned: Callable[[], bool]) -> str:
    """Wait until every replica has joined in the store; return a key prefix unique to this group."""
    # Keys must not collide with those of an earlier group in the same store. No rank forms its next group before
    # all have formed this one, so the count of joins identifies the group.
    num_replicas = context.num_replicas
    prefix = f"lp_runtime/{context.attempt}/{num_replicas}"
    number = (store.add(f"{prefix}/joined", 1) - 1) // num_replicas
    wait_for_all(store, f"{prefix}/joined", (number + 1) * num_replicas, timeout, is_abandoned)
    return f"{prefix}/{number}"


@contextmanager
def existing_or_new_group(device: torch.device, timeout: float) -> Iterator[Group]:
    """Yield the default process group of torchrun's ranks, or a new group that is left at the end.

    `timeout` is the limit in seconds for a new group to form, and for a rank to answer in a step.
    """
    if dist.is_initialized():
        on_gpu = "nccl" in str(dist.get_backend_config()) and device.type == "cuda"
        backend = "nccl" if on_gpu else "gloo"
        transport = CollectiveTransport(backend, dist.get_rank(), device, timeout, is_ours=False)
        yield Group(dist.get_rank(), dist.get_world_size(), transport)
        return
    context = ReplicaContext.from_torchrun()
    store = None if context.num_replicas == 1 else _connect_once(context, timeout)
    with process_group(context, device, GroupOptions(timeout), store) as group:
        yield group


_connect_once = functools.cache(connect)  # connecting may take seconds


def num_processes() -> int:
    """Return the size of the default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1
