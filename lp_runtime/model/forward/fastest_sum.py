"""Choice of the all-reduce for small tensors of a replica's GPUs: NCCL, or one shot if it is faster.

Letters: P shards, E hidden size.
"""

from __future__ import annotations

import logging

import torch

from lp_runtime.distributed.reducers import OneShotReducer, Reducer
from lp_runtime.distributed.shards import ShardLink
from lp_runtime.errors import ShardError, first_line
from lp_runtime.kernels.dispatch import on
from lp_runtime.model.forward.graph_capture import GraphCapture

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)  # supported by torch's one-shot kernel
ROWS = (1, 8, 16, 32, 64, 128, 256)  # tokens of the passes whose all-reduces are timed
NUM_SUMS = 16  # all-reduces in a captured graph
NUM_REPLAYS = 5
MAX_SHARE = 0.95  # one shot must take less than this share of NCCL's time
TOLERANCE = 0.05  # allowed difference relative to the largest sum: rounding in half precision


def fastest_reducer(link: ShardLink, width: int, dtype: torch.dtype, device: torch.device, timeout: float) -> Reducer:
    """Return the fastest reducer; all shards must call this together, and get the same result.

    It is the link's reducer, or one that all-reduces small tensors in one shot if its CUDA graphs replay faster.
    `width` is E, and the shards must set up shared memory within `timeout` seconds.
    """
    reducer = link.reducer
    if not reducer.can_capture or dtype not in DTYPES:
        return reducer
    with on(device):
        buffer = link.peer_buffer(ROWS[-1] * width, dtype, device, min(timeout, link.place.step_timeout / 2))
    if buffer is None:
        return reducer
    one_shot = OneShotReducer(reducer, buffer, link.place.segment)
    fastest = 0
    for num_rows in ROWS:
        of_ring, of_one_shot = (_seconds(link, each, num_rows * width, dtype, device) for each in (reducer, one_shot))
        if of_ring is None or of_one_shot is None:  # the same on all shards
            break
        is_faster = of_one_shot < MAX_SHARE * of_ring
        is_right = _is_correct(link, one_shot, reducer, num_rows * width, dtype, device)
        if not link.smallest(is_faster and is_right):
            break
        fastest = num_rows
        log.info("all-reduce of %d tokens: NCCL %.1f us, one shot %.1f us", num_rows, 1e6 * of_ring, 1e6 * of_one_shot)
    if not fastest:
        return reducer
    one_shot.max_numbers = fastest * width
    return one_shot


def _seconds(link: ShardLink, reducer: Reducer, size: int, dtype: torch.dtype, device: torch.device) -> float | None:
    """Return the seconds of one all-reduce of `size` numbers in a replayed graph; None if capture fails."""
    zeros = torch.zeros(size, dtype=dtype, device=device)

    def run() -> None:
        for _ in range(NUM_SUMS):
            reducer.all_reduce(zeros)

    try:
        replay = GraphCapture(device).capture(run)
    except ShardError:
        raise
    except Exception as error:  # torch's kernel raises various types if it rejects a tensor
        log.info("%s", first_line(error))
        replay = None
    if not link.smallest(replay is not None):
        return None
    assert replay is not None
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        start.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1e-3 * min(times) / NUM_SUMS


def _is_correct(
    link: ShardLink, one_shot: Reducer, reducer: Reducer, size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether one shot equals the other reducer up to rounding, with the same bits on all shards."""
    generator = torch.Generator().manual_seed(link.place.shard)
    numbers = torch.randn(size, generator=generator).to(device=device, dtype=dtype)
    total, expected = one_shot.all_reduce(numbers.clone()), reducer.all_reduce(numbers.clone())
    everywhere = reducer.all_gather(total)
    is_close = (total - expected).abs().max() <= TOLERANCE * expected.abs().max()
    return bool(is_close.cpu()) and torch.equal(everywhere.cpu(), total.cpu().expand_as(everywhere))
