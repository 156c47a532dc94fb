"""Compares the partition's busiest replica with the proven optimum and with the reference's split.

    python benchmarks/micro.py partition                         # (15, 5, 15) on 1, 2, 3, 4, 8 and 16 replicas
    python benchmarks/micro.py partition --W 7 --N 5 --G 7 --gpus 2 4

The tree is the largest of the drafter `paper`: the root alone is pending, the window is full, and G guesses share no
prefix: W(N-1) + G(N-1) tokens. Its leaves are the ends of the W columns and of the G guesses, so a share with the
columns S and g guesses feeds

    1 + max(S) + (N-2) |S| + (N-1) g      (root, level 0 down to the last column, the columns below it, the guesses)

tokens. The least possible largest share is computed exactly: see `optimum`.
"""

from __future__ import annotations

import argparse
from functools import lru_cache

from common import Results

from lp_runtime.distributed.partition.partition import partition
from lp_runtime.lookahead.drafters.paper.window import Window
from lp_runtime.lookahead.tree import TokenTree


def full_tree(W: int, N: int, G: int) -> TokenTree:
    """Return the largest tree of a step, all tokens different."""
    tokens = iter(range(1, 1_000_000))
    tree = TokenTree([0], max_depth=W + N)
    window = Window(W, N, lambda previous: next(tokens))
    while not window.is_full:
        window.levels.append([next(tokens) for _ in range(W)])
    window.place(tree)
    for _ in range(G):
        tree.add_branch([next(tokens) for _ in range(N - 1)])
    return tree


def ours(W: int, N: int, G: int, num_replicas: int) -> tuple[int, float]:
    """Return the tokens that the busiest replica feeds under `partition`, and the mean over replicas."""
    loads = [len(share.nodes) for share in partition(full_tree(W, N, G), [1.0] * num_replicas)]
    return max(loads), sum(loads) / num_replicas


def is_possible(W: int, N: int, G: int, num_replicas: int, cap: int) -> bool:
    """Return whether some partition feeds no replica more than `cap` tokens; searches all partitions.

    Columns are assigned from the last (the most expensive chain) to the first. The first column that a replica gets
    determines its chain. Together with the total number of columns that the replica will get, that determines how many
    guesses still fit. It does not matter which of the open replicas gets a later column, so only the sum of their free
    places is kept.
    """

    @lru_cache(None)
    def most_guesses(column: int, num_places: int, num_unused: int) -> float:
        if column < 0:
            return num_unused * ((cap - 1) // (N - 1)) if num_places == 0 else float("-inf")
        best = float("-inf")
        if num_places:
            best = most_guesses(column - 1, num_places - 1, num_unused)
        if num_unused:
            for num_columns in range(1, column + 2):
                capacity = cap - 1 - column - (N - 2) * num_columns
                if capacity < 0:
                    break
                rest = most_guesses(column - 1, num_places + num_columns - 1, num_unused - 1)
                best = max(best, capacity // (N - 1) + rest)
        return best

    return most_guesses(W - 1, 0, num_replicas) >= G


def optimum(W: int, N: int, G: int, num_replicas: int) -> int:
    """Return the least number of tokens that the busiest replica must feed: the smallest possible cap.

    A partition that is possible under a cap is possible under a larger one, so the first cap found is the least. N >= 3
    gives every column a separate end.
    """
    assert W >= 1 and N >= 3
    cap = 1
    while not is_possible(W, N, G, num_replicas, cap):
        cap += 1
    return cap


def reference(W: int, N: int, G: int, num_replicas: int) -> int:
    """Return the tokens that the busiest worker of lade feeds.

    Follows lade/decoding.py (GitHub, commit 0e9f02d, DIST_WORKERS > 1). Columns and guesses are each cut into runs of
    ceil(count / workers); every worker feeds level 0 up to the end of its run (the root counts as its first column).
    """
    columns, guesses = -(-W // num_replicas), -(-G // num_replicas)
    loads = []
    for rank in range(num_replicas):
        start, end = min(columns * rank, W), min(columns * (rank + 1), W)
        num_guesses = max(0, min(guesses, G - guesses * rank))
        loads.append(end + (N - 2) * (end - start) + (N - 1) * num_guesses)
    return max(loads)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--W", type=int, default=15, help="window columns, >= 1")
    parser.add_argument("--N", type=int, default=5, help="n-gram size, >= 3")
    parser.add_argument("--G", type=int, default=15, help="guesses, >= 0")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16], help="numbers of replicas, >= 1")


def run(args: argparse.Namespace) -> int:
    """Compare every number of replicas."""
    if args.W < 1 or args.N < 3 or args.G < 0 or min(args.gpus) < 1:
        raise SystemExit("partition: needs --W >= 1, --N >= 3, --G >= 0 and --gpus >= 1")
    results = Results("partition", args.output, {"mean": ".1f"})
    for num_replicas in args.gpus:
        busiest, mean = ours(args.W, args.N, args.G, num_replicas)
        best = optimum(args.W, args.N, args.G, num_replicas)
        assert best <= busiest
        row = {"replicas": num_replicas, "busiest": busiest, "optimum (proven)": best, "mean": mean}
        results.add(row | {"lade, busiest": reference(args.W, args.N, args.G, num_replicas)})
    results.finish(f"tokens that a replica feeds, (W, N, G) = ({args.W}, {args.N}, {args.G})")
    return 0
