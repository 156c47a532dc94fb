"""Real processes that exchange, for tests that need more than one replica."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import torch

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.process_group import GroupOptions, process_group
from lp_runtime.distributed.store import address_of, host_store
from lp_runtime.errors import LookaheadError
from support.forked import forking, next_result

CPU = torch.device("cpu")
TIMEOUT = 600.0  # seconds before a rank gives a peer up; not a performance bound


def interfaces() -> list[str]:
    """Return the network interfaces that a process can listen on; lo is the first."""
    results = []
    for name in sorted(psutil.net_if_addrs(), key=lambda name: name != "lo"):
        with contextlib.suppress(LookaheadError):
            host_store(address_of(name), 0, 1.0)
            results.append(name)
    return results


def _joined(context: ReplicaContext, options: GroupOptions):
    """Return a rank's group; with "two machines", only the last rank is on the second one."""
    if options.backend != "two machines":
        return process_group(context, CPU, options)
    machine = f"machine {context.rank == context.num_replicas - 1}"
    return process_group(context, CPU, replace(options, backend="auto", machine=machine))


def _enter(
    task: Callable, arguments: tuple, rank: int, num_replicas: int, port: int, options: GroupOptions, results
) -> None:
    """Run in a rank's process: join the group, run the task, report its result or its error."""
    torch.set_num_threads(1)
    context = ReplicaContext(rank, num_replicas, host="127.0.0.1", port=port)
    try:
        with _joined(context, options) as group:
            results.put((rank, task(group, *arguments)))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        results.put((rank, error))


@contextmanager
def running_ranks(
    task: Callable, num_replicas: int, *arguments, backend: str = "auto", step_timeout: float = TIMEOUT
) -> Iterator[tuple[list, object]]:
    """Start `task(group, *arguments)` in a process for each rank of a group.

    `backend` is a value of launcher.backend, or "two machines": this machine under two names.

    Yields:
        The processes, by rank, and the queue of (rank, what the task returned or raised).
    """
    results = forking().Queue()
    store = host_store("127.0.0.1", 0, TIMEOUT)
    place = (num_replicas, store.port, GroupOptions(TIMEOUT, step_timeout, backend), results)
    processes = [
        forking().Process(target=_enter, args=(task, arguments, rank, *place), daemon=True)
        for rank in range(num_replicas)
    ]
    try:
        for process in processes:
            process.start()
        yield processes, results
    finally:
        for process in processes:
            process.join(TIMEOUT)
            process.kill()


def run_ranks(task: Callable, num_replicas: int, *arguments, backend: str = "auto") -> list:
    """Return what `task(group, *arguments)` returned, or raised, on every rank."""
    with running_ranks(task, num_replicas, *arguments, backend=backend) as (processes, results):
        actual = dict(next_result(results, processes) for _ in processes)
    return [actual[rank] for rank in range(num_replicas)]
