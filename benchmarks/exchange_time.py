"""What the exchange of a step takes by itself, between processes of this machine, without any model.

    python benchmarks/exchange_time.py --gpus 2 4 --nodes 16 64 256

Microseconds, median and quartiles of the first rank; the replicas enter it together, again and again, one thread each.
Over gloo (CPU); nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import machine, markdown

from lp_runtime.distributed.exchange import Exchange
from lp_runtime.distributed.partition import Shares
from lp_runtime.lookahead.drafters.best_first.tables import K

WIDTH = 1 + K // 2
CPU = torch.device("cpu")


def measure(rank: int, num_replicas: int, port: int, nodes: list[int], rounds: int, results) -> None:
    """One rank: `rounds` exchanges of every size; the first rank puts (nodes, quartiles) into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_replicas)
    for num_owned in nodes:
        nodes, counts = np.arange(num_replicas * num_owned), [num_owned] * num_replicas
        shares = Shares(np.arange(num_replicas).repeat(num_owned), nodes, nodes, counts, counts)
        exchange = Exchange(rank, num_replicas, num_owned, CPU, WIDTH)
        values = torch.full((num_owned, WIDTH), rank)
        times = []
        for number in range(rounds + 20):
            started = time.perf_counter()
            outcome = exchange.all_gather(shares, values, number, 0)
            if number >= 20:
                times.append(1e6 * (time.perf_counter() - started))
        assert (outcome.values[:, 0] == shares.owner).all()
        if rank == 0:
            results.put((num_owned, statistics.quantiles(times, n=4), exchange.bytes_sent // (rounds + 20)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[2], help="numbers of replicas")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64, 256], help="that a replica owns")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--port", type=int, default=29871)
    args = parser.parse_args()
    rows = []
    for num_replicas in args.gpus:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure, (num_replicas, args.port, args.nodes, args.rounds, results), nprocs=num_replicas, join=True)
        while not results.empty():
            nodes, (lower, median, upper), size = results.get()
            rows.append([num_replicas, nodes, size, f"{median:.0f}", f"{lower:.0f} to {upper:.0f}"])
    print(f"{machine()}\n")
    print(markdown(["replicas", "nodes a replica", "bytes a replica", "median us", "quartiles"], rows))


if __name__ == "__main__":
    main()
