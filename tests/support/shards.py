"""Real processes that are the shards of one replica."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable

import torch

from lp_runtime.distributed.process_group import new_segment_name
from lp_runtime.distributed.shards import ShardPlace
from support.forked import forking, next_result

TIMEOUT = 600.0  # seconds before a shard gives another one up; not a performance bound


def _enter(task: Callable, place: ShardPlace, arguments: tuple, results) -> None:
    torch.set_num_threads(1)
    try:
        actual = task(place, *arguments)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        actual = error
    results.put((place.shard, pickle.dumps(actual)))  # tensors by value: the process ends


def run_shards(task: Callable, num_shards: int, *arguments) -> list:
    """Run `task(place, *arguments)` on every shard, each in a process; return the results or errors."""
    results, segment = forking().Queue(), new_segment_name()
    places = [ShardPlace(shard, num_shards, segment, step_timeout=TIMEOUT) for shard in range(num_shards)]
    processes = [
        forking().Process(target=_enter, args=(task, each, arguments, results), daemon=True) for each in places
    ]
    try:
        for process in processes:
            process.start()
        actual = dict(next_result(results, processes) for _ in processes)
    finally:
        for process in processes:
            process.join(TIMEOUT)
            process.kill()
    return [pickle.loads(actual[shard]) for shard in range(num_shards)]
