"""What the exchange of a step takes by itself, between processes of this machine, without any model.

    python benchmarks/micro.py exchange --gpus 2 4 --nodes 16 64 256

Microseconds of the first rank, median and quartiles; the replicas enter the exchange together, again and again, one
thread each. Over gloo (CPU); nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Results

from lp_runtime.distributed.exchange import Exchange
from lp_runtime.distributed.group import CPU, Group
from lp_runtime.distributed.partition import Shares
from lp_runtime.lookahead.drafters.best_first.tables import K

WIDTH = 1 + K // 2  # integers of a node's result with its top-k candidates
NUM_WARM_UPS = 20  # exchanges of each size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--gpus", nargs="+", type=int, default=[2], help="numbers of replicas")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64, 256], help="that a replica owns")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--port", type=int, default=29871)


def measure(rank: int, num_replicas: int, port: int, sizes: Sequence[int], rounds: int, results: SimpleQueue) -> None:
    """Be one rank, in a process of its own.

    Args:
        rank: of the process.
        num_replicas: in the group.
        port: where the ranks meet.
        sizes: numbers of nodes that a replica owns.
        rounds: exchanges of every size.
        results: gets (nodes, quartiles in microseconds, bytes sent by a replica) of every size, from the first rank.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_replicas)
    for num_owned in sizes:
        nodes, counts = np.arange(num_replicas * num_owned), [num_owned] * num_replicas
        shares = Shares(np.arange(num_replicas).repeat(num_owned), nodes, nodes, counts, counts)
        exchange = Exchange(Group(rank, num_replicas, CPU), num_owned, WIDTH)
        values = torch.full((num_owned, WIDTH), rank)
        times = []
        for number in range(rounds + NUM_WARM_UPS):
            started = time.perf_counter()
            outcome = exchange.all_gather(shares, values, number, 0)
            if number >= NUM_WARM_UPS:
                times.append(1e6 * (time.perf_counter() - started))
        assert (outcome.values[:, 0] == shares.owner).all()
        if rank == 0:
            bytes_sent = exchange.bytes_sent // (rounds + NUM_WARM_UPS)
            results.put((num_owned, statistics.quantiles(times, n=4), bytes_sent))
    dist.barrier()
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> int:
    """Measure every number of replicas."""
    table = Results("exchange", args.output, {"median us": ".0f", "quartiles": ".0f"})
    for num_replicas in args.gpus:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure, (num_replicas, args.port, args.nodes, args.rounds, results), nprocs=num_replicas, join=True)
        while not results.empty():
            nodes, (lower, median, upper), bytes_sent = results.get()
            row = {"replicas": num_replicas, "nodes a replica": nodes, "bytes a replica": bytes_sent}
            table.add(row | {"median us": median, "quartiles": [lower, upper]})
    table.finish(f"{args.rounds} exchanges of each size, over gloo")
    return 0
