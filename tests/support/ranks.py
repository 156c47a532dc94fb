"""Real processes that meet over gloo, for the tests that need more than one replica."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.process_group import GroupOptions, address_of, host_store, process_group
from lp_runtime.errors import LookaheadError
from support.forked import forking

CPU = torch.device("cpu")
TIMEOUT = 60.0  # seconds


def interfaces() -> list[str]:
    """Return the network interfaces that a process can listen on; lo is the first."""
    found = []
    for name in sorted(psutil.net_if_addrs(), key=lambda name: name != "lo"):
        with contextlib.suppress(LookaheadError):
            host_store(address_of(name), 0, 1.0)
            found.append(name)
    return found


def _enter(task: Callable, arguments: tuple, rank: int, num_replicas: int, port: int, results) -> None:
    """Run in a rank's process: join the group, run the task, report its result or its error."""
    torch.set_num_threads(1)
    context = ReplicaContext(rank, num_replicas, host="127.0.0.1", port=port)
    try:
        with process_group(context, CPU, GroupOptions(TIMEOUT)):
            results.put((rank, task(rank, num_replicas, *arguments)))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        results.put((rank, error))


@contextmanager
def running_ranks(task: Callable, num_replicas: int, *arguments) -> Iterator[tuple[list, object]]:
    """Start `task(rank, num_replicas, *arguments)` in a process for each rank, inside a process group over gloo.

    A task that wants the group makes it: `Group(rank, num_replicas, CPU)`.

    Yields:
        The processes, by rank, and the queue of (rank, what the task returned or raised).
    """
    results = forking().Queue()
    store = host_store("127.0.0.1", 0, TIMEOUT)
    processes = [
        forking().Process(target=_enter, args=(task, arguments, rank, num_replicas, store.port, results), daemon=True)
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


def run_ranks(task: Callable, num_replicas: int, *arguments) -> list:
    """Return what `task(rank, num_replicas, *arguments)` returned, or raised, on every rank."""
    with running_ranks(task, num_replicas, *arguments) as (processes, results):
        found = dict(results.get(timeout=2 * TIMEOUT) for _ in processes)
    return [found[rank] for rank in range(num_replicas)]
