"""How good the partition is: what the busiest replica feeds, beside the proven optimum and the reference's split.

    python benchmarks/partition_bound.py                         # (15, 5, 15) on 1, 2, 3, 4, 8 and 16 replicas
    python benchmarks/partition_bound.py --W 7 --N 5 --G 7 --replicas 2 4 --markdown

The tree is a step's largest one: the root alone is pending, the window is full, and G guesses share no prefix:
W(N-1) + G(N-1) tokens. Its leaves are the feet of the W columns and of the G guesses, so a share with the columns S
and g guesses feeds

    1 + max(S) + (N-2) |S| + (N-1) g      (root, level 0 down to the last column, the columns below it, the guesses)

tokens, and the least possible largest share is found exactly, see `optimum`.
"""

from __future__ import annotations

import argparse
from functools import lru_cache

from lp_runtime.distributed.partition import partition
from lp_runtime.lookahead.drafters.paper.window import Window
from lp_runtime.lookahead.tree import TokenTree


def full_tree(W: int, N: int, G: int) -> TokenTree:
    """The largest tree of a step, all tokens different."""
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
    """(busiest, mean) tokens that a replica feeds under `partition`."""
    loads = [len(share.nodes) for share in partition(full_tree(W, N, G), [1.0] * num_replicas)]
    return max(loads), sum(loads) / num_replicas


def is_possible(W: int, N: int, G: int, num_replicas: int, cap: int) -> bool:
    """Whether some partition feeds no replica more than `cap` tokens. Exact: a search over all of them.

    Columns are handed out from the last (the dearest chain) to the first. The first column that a replica gets fixes
    its chain; with how many columns it will take in all, that fixes how many guesses still fit. Which of the open
    replicas takes a later column makes no other difference, so only the sum of their free places is kept.
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
                room = cap - 1 - column - (N - 2) * num_columns
                if room < 0:
                    break
                rest = most_guesses(column - 1, num_places + num_columns - 1, num_unused - 1)
                best = max(best, room // (N - 1) + rest)
        return best

    return most_guesses(W - 1, 0, num_replicas) >= G


def optimum(W: int, N: int, G: int, num_replicas: int) -> int:
    """The least number of tokens that the busiest replica must feed: the smallest possible cap.

    What is possible under a cap is possible under a larger one, so the first one found is the least. N >= 3, so that
    every column has a foot of its own.
    """
    assert W >= 1 and N >= 3
    cap = 1
    while not is_possible(W, N, G, num_replicas, cap):
        cap += 1
    return cap


def reference(W: int, N: int, G: int, num_replicas: int) -> int:
    """What lade's busiest worker feeds (lade/decoding.py on GitHub, commit 0e9f02d, greedy loop, DIST_WORKERS > 1).

    Columns and guesses are each cut into runs of ceil(count / workers); every worker feeds level 0 up to the end of
    its run (the root counts as its first column).
    """
    columns, guesses = -(-W // num_replicas), -(-G // num_replicas)
    loads = []
    for rank in range(num_replicas):
        start, end = min(columns * rank, W), min(columns * (rank + 1), W)
        num_guesses = max(0, min(guesses, G - guesses * rank))
        loads.append(end + (N - 2) * (end - start) + (N - 1) * num_guesses)
    return max(loads)


def table(W: int, N: int, G: int, counts: list[int], markdown: bool) -> str:
    """One line for each number of replicas."""
    head = ["replicas", "ours, busiest", "optimum (proven)", "ours, mean", "lade, busiest"]
    rows = []
    for count in counts:
        busiest, mean = ours(W, N, G, count)
        best = optimum(W, N, G, count)
        assert best <= busiest
        rows.append([str(count), str(busiest), str(best), f"{mean:.1f}", str(reference(W, N, G, count))])
    if markdown:
        return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---:"] * len(head), *rows])
    return "\n".join(
        "  ".join(cell.rjust(len(name)) for cell, name in zip(row, head, strict=True)) for row in [head, *rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--W", type=int, default=15, help="window columns, >= 1")
    parser.add_argument("--N", type=int, default=5, help="n-gram size, >= 3")
    parser.add_argument("--G", type=int, default=15, help="guesses, >= 0")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16])
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args()
    if args.W < 1 or args.N < 3 or args.G < 0 or min(args.replicas) < 1:
        parser.error("needs W >= 1, N >= 3, G >= 0 and replicas >= 1")
    print(table(args.W, args.N, args.G, args.replicas, args.markdown))


if __name__ == "__main__":
    main()
