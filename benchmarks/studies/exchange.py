"""Times the exchange of a step by itself, between processes of this machine, without a model.

    python benchmarks/micro.py exchange --gpus 2 4 --nodes 16 64 256 --regroup 1000
    python benchmarks/micro.py exchange --gpus 2 --rounds 300 --announce 2 4 7

Figures are microseconds of the first rank: median, quartiles and 99th percentile. The replicas, of one thread each,
enter the exchange together, again and again. The transports take turns: a block of exchanges over one, then over the
next. A second table has the time to leave a group and to exchange in the next one, and the open files, mapped memory or
segments that a leak would leave. A third one has the time until the second shard of a replica that spans several
devices hears of a pass, as shard 0 does which announces it. Nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.queues import SimpleQueue

import numpy as np
import psutil
import torch
from common import Results, Row

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.exchange import Exchange, gather_rows
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.distributed.process_group import GroupOptions, process_group
from lp_runtime.distributed.shards import ShardLink, ShardPlace
from lp_runtime.distributed.store import connect, host_store
from lp_runtime.distributed.transport.group import CPU, Group
from lp_runtime.lookahead.top_k import K

WIDTH = 1 + K // 2  # integers per node: its result and its top-k candidates
NUM_WARM_UPS = 20  # exchanges per size
NUM_BLOCKS = 5  # blocks of exchanges per transport
TIMEOUT_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--gpus", nargs="+", type=int, default=[2], help="numbers of replicas")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64, 256], help="nodes that a replica owns")
    parser.add_argument("--backends", nargs="+", default=["shared", "gloo"], help="transports, which take turns")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--regroup", type=int, default=0, help="number of groups to form one after another")
    parser.add_argument(
        "--announce", nargs="+", type=float, default=[], metavar="MS", help="milliseconds between announced passes"
    )


def exchange_times(group: Group, num_owned: int, rounds: int) -> tuple[list[float], int]:
    """Return the microseconds of each exchange on this rank, and the bytes that it sent in one."""
    nodes, counts = np.arange(group.size * num_owned), [num_owned] * group.size
    shares = Shares(np.arange(group.size).repeat(num_owned), nodes, nodes, counts, counts)
    exchange = Exchange(group, num_owned, WIDTH)
    values = torch.full((num_owned, WIDTH), group.rank)
    times = []
    for number in range(rounds + NUM_WARM_UPS):
        started = time.perf_counter()
        outcome = exchange.all_gather(shares, values, number, 0)
        if number >= NUM_WARM_UPS:
            times.append(1e6 * (time.perf_counter() - started))
    assert (outcome.values[:, 0] == shares.owner).all()
    return times, exchange.bytes_sent // (rounds + NUM_WARM_UPS)


def regroup_times(context: ReplicaContext, options: GroupOptions, count: int) -> tuple[list[float], int, int]:
    """Form groups one after another, like replicas that a driver leads.

    With shared memory, the ranks meet by segment name; otherwise in a store to which they stay connected. A time runs
    from leaving a group to the end of the first gather in the next one.

    Returns:
        (times, files, maps): milliseconds; open files and mapped segments added since the first groups.
    """
    process, times, before = psutil.Process(), [], (0, 0)
    store = connect(context, TIMEOUT_SECONDS)
    with contextlib.ExitStack() as membership:
        for number in range(count):
            started = time.perf_counter()
            membership.close()
            segment = f"lp_runtime-regroup-{context.port}-{number}" if options.backend == "shared" else ""
            joined = process_group(replace(context, segment=segment), CPU, options, store)
            group = membership.enter_context(joined)
            gather_rows(np.array([number]), group)
            times.append(1e3 * (time.perf_counter() - started))
            if number == NUM_WARM_UPS:
                before = _held(process)
        after = _held(process)
    return times[NUM_WARM_UPS:], after[0] - before[0], after[1] - before[1]


def announcement_times(place: ShardPlace, seconds: float, rounds: int) -> list[float]:
    """Return the microseconds until this shard hears each announcement of shard 0; of shard 0 itself, nothing.

    Shard 0 computes for `seconds` before each announcement.
    """
    link, times = ShardLink(place, CPU, TIMEOUT_SECONDS), []
    for _ in range(rounds + NUM_WARM_UPS):
        if place.is_leader:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            link.announce(time.perf_counter())
        else:
            announced = link.listen()
            assert isinstance(announced, float)
            times.append(1e6 * (time.perf_counter() - announced))  # one clock for all processes of a machine
    return times[NUM_WARM_UPS:]


def _held(process: psutil.Process) -> tuple[int, int]:
    """Return the number of open files and of mapped segments of a process."""
    return process.num_fds(), sum("lp_runtime-" in each.path for each in process.memory_maps())


def measure(rank: int, num_replicas: int, port: int, args: argparse.Namespace, results: SimpleQueue) -> None:
    """Run one rank in a separate process.

    Args:
        rank: rank of the process.
        num_replicas: size of the group.
        port: port of the store in which the ranks meet.
        args: arguments of the study.
        results: gets the measurements of the first rank, or of the second shard, as `run` reads them.
    """
    torch.set_num_threads(1)
    context = ReplicaContext(rank, num_replicas, host="127.0.0.1", port=port)
    times: dict[tuple[int, str], list[float]] = {}
    for num_owned in args.nodes:
        for _ in range(NUM_BLOCKS):
            for backend in args.backends:
                with process_group(context, CPU, GroupOptions(TIMEOUT_SECONDS, backend=backend)) as group:
                    block, num_bytes = exchange_times(group, num_owned, args.rounds // NUM_BLOCKS)
                times.setdefault((num_owned, backend), []).extend(block)
        if rank == 0:
            for backend in args.backends:
                results.put(("exchange", backend, num_owned, num_bytes, times[num_owned, backend]))
    if args.regroup:
        for backend in args.backends:
            options = GroupOptions(TIMEOUT_SECONDS, backend=backend)
            seconds, num_files, num_maps = regroup_times(context, options, args.regroup + NUM_WARM_UPS)
            if rank == 0:
                results.put(("regroup", backend, num_files, num_maps, seconds))
    for milliseconds in args.announce:
        place = ShardPlace(rank, num_replicas, f"lp_runtime-announce-{port}-{milliseconds:g}")
        heard = announcement_times(place, milliseconds / 1e3, args.rounds)
        if rank == 1:
            results.put(("announce", "shared", milliseconds, 0, heard))


def _quartiles(times: Sequence[float]) -> Row:
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"median": median, "quartiles": [lower, upper], "99%": statistics.quantiles(times, n=100)[98]}


def run(args: argparse.Namespace) -> int:
    """Measure every number of replicas."""
    table = Results("exchange", args.output, dict.fromkeys(("median", "quartiles", "99%"), ".1f"))
    regroups = Results("regroup", args.output, dict.fromkeys(("median", "quartiles", "99%"), ".2f"))
    announcements = Results("announcements", args.output, dict.fromkeys(("median", "quartiles", "99%"), ".1f"))
    for num_replicas in args.gpus:
        store = host_store("127.0.0.1", 0, TIMEOUT_SECONDS)
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        place = (num_replicas, store.port, args, results)
        processes = [context.Process(target=measure, args=(rank, *place), daemon=True) for rank in range(num_replicas)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank of {num_replicas} failed: exit status {process.exitcode}")
        while not results.empty():
            what, backend, first, second, times = results.get()
            row: Row = {"replicas": num_replicas, "backend": backend}
            if what == "exchange":
                table.add(row | {"nodes a replica": first, "bytes a replica": second} | _quartiles(times))
            elif what == "regroup":
                regroups.add(row | _quartiles(times) | {"files left": first, "segments left": second})
            else:
                announcements.add({"shards": num_replicas, "ms between passes": first} | _quartiles(times))
    table.finish(f"microseconds; {args.rounds} exchanges of each size and transport, in {NUM_BLOCKS} blocks in turns")
    if args.regroup:
        regroups.finish(f"milliseconds; {args.regroup} groups one after another")
    if args.announce:
        announcements.finish(f"microseconds until the second shard hears of a pass; {args.rounds} passes each")
    return 0
