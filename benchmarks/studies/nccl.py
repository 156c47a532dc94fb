"""Checks, part by part, what a runtime relies on NCCL for: one GPU, a communicator of one rank.

    python benchmarks/resilience.py nccl

The parts are: forming the communicator, a gather, a captured graph that is replayed before and after a gather, an abort
by another thread while this thread continues, leaving, and forming it again. Each part is a row with its milliseconds
as soon as it is done. If a part does not end in time, the process names it and ends with status 3: finding such parts
is the purpose of this study. The exit status is 1 if a part fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from common import Results
from torch._C._distributed_c10d import HashStore, PrefixStore

from lp_runtime.errors import first_line
from lp_runtime.replica.loading import choose_device

NUM_INTEGERS = 64 * 5  # about as many as in the row of a step
NUM_REPLAYS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"], help="gloo if there is no GPU")
    parser.add_argument("--part-seconds", type=float, default=30.0, help="time limit of a part")


class Communicator:
    """Process group of one rank, which can be formed repeatedly.

    Args:
        backend: nccl or gloo.
        device: device of the tensors.
    """

    def __init__(self, backend: str, device: torch.device):
        self._backend, self._device = backend, device
        self._store = HashStore()
        self._numbers = itertools.count()
        self._row = torch.arange(NUM_INTEGERS, device=device)
        self._gathered = torch.empty_like(self._row)
        self._replay: Callable[[], object] | None = None
        self._counted = torch.zeros(1, device=device)

    def form(self) -> None:
        """Form the group under a new name."""
        dist.init_process_group(
            self._backend,
            store=PrefixStore(str(next(self._numbers)), self._store),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=20),
            device_id=self._device if self._backend == "nccl" else None,
        )

    def gather(self) -> None:
        """Gather a row, and compare it."""
        self._gathered.zero_()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(self._gathered, self._row)
        assert torch.equal(self._gathered, self._row)

    def capture(self) -> None:
        """Capture a graph of this thread's own kernels while the group exists."""
        if self._device.type != "cuda":
            self._replay = lambda: self._counted.add_(1)
            return
        self._counted.add_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread queries its events meanwhile
            self._counted.add_(1)
        self._replay = graph.replay

    def replay_between_gathers(self) -> None:
        """Replay the graph before and after gathers, and count the replays."""
        assert self._replay is not None
        self._counted.zero_()
        for _ in range(NUM_REPLAYS):
            self._replay()
            self.gather()
        assert self._counted.item() == NUM_REPLAYS

    def abort_from_another_thread(self) -> None:
        """Abort the group in a thread while this one replays its graph."""
        assert self._replay is not None
        failures: list[BaseException] = []

        def abort() -> None:
            try:
                if self._backend == "nccl":  # gloo has nothing to abort
                    world = dist.group.WORLD
                    assert world is not None
                    world.abort()
                dist.destroy_process_group()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=abort)
        thread.start()
        for _ in range(NUM_REPLAYS):
            self._replay()
        thread.join()
        if failures:
            raise failures[0]
        assert not dist.is_initialized()

    def leave(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
        assert not dist.is_initialized()


def run(args: argparse.Namespace) -> int:
    """Run every part; return 1 if one fails."""
    device = choose_device("auto", 0)
    if args.backend == "nccl" and device.type != "cuda":
        raise SystemExit("--backend nccl: needs a GPU")
    one = Communicator(args.backend, device)
    parts: dict[str, Callable[[], None]] = {
        "form": one.form,
        "gather": one.gather,
        "capture next to it": one.capture,
        "replays between gathers": one.replay_between_gathers,
        "abort from another thread": one.abort_from_another_thread,
        "form again": one.form,
        "gather again": one.gather,
        "leave": one.leave,
        "form a third time": one.form,
        "replays again": one.replay_between_gathers,
        "leave again": one.leave,
    }
    results = Results("nccl", args.output, {"ms": ".1f"})
    num_failed = 0
    for name, part in parts.items():
        print(f"... {name}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(args.part_seconds, exit=True)
        started = time.perf_counter()
        try:
            part()
            outcome = "ok"
        except Exception as error:
            outcome = f"{type(error).__name__}: {first_line(error)}".replace("|", "/")
            num_failed += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        faulthandler.cancel_dump_traceback_later()
        results.add({"part": name, "ms": 1e3 * (time.perf_counter() - started), "outcome": outcome})
    results.finish(f"{args.backend}, one rank")
    return 1 if num_failed else 0
