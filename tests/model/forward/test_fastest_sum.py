"""Small all-reduces use the one-shot kernel if it works, is correct and is measured faster than NCCL."""

from __future__ import annotations

import shutil

import pytest
import torch
from support import simulated_shards
from support.shards import run_shards
from support.simulated_shards import CUDA, DeviceReducer, gpu_of_a_shard, link_on_devices

from lp_runtime.distributed import shards
from lp_runtime.distributed.reducers import OneShotReducer
from lp_runtime.model.forward import fastest_sum
from lp_runtime.model.forward.fastest_sum import ROWS, fastest_reducer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
WIDTH = 16
FASTER_UP_TO = 32  # tokens


def one_shot(buffer: torch.Tensor, numbers: torch.Tensor, operation: str, name: str) -> torch.Tensor:
    """Compute the same sum as torch's one-shot kernel."""
    assert operation == "sum" and buffer.shape == numbers.shape and numbers.dim() == 1
    return simulated_shards._host[-1].all_reduce(numbers.clone())


def choose(place: shards.ShardPlace, kind: str, slow_shard: int) -> tuple[int, list[float], list[int]]:
    """Let the shards choose a reducer, and use it.

    Return the largest one-shot sum in tokens; the sums of 1, 32 and 64 tokens; and which of these were one-shot.
    """
    called: list[int] = []

    def counted(buffer, numbers, operation, name):
        if kind == "refused":
            raise RuntimeError("one_shot_all_reduce: not with these tensors")
        called.append(len(numbers) // WIDTH)
        total = one_shot(buffer, numbers, operation, name)
        return total + (kind == "wrong")

    def seconds(link, reducer, size, dtype, device):
        if measured(link, reducer, size, dtype, device) is None:  # this captures and replays the sum
            return None
        if kind == "cannot be captured" and isinstance(reducer, OneShotReducer):
            return None
        is_fast = size <= FASTER_UP_TO * WIDTH and place.shard != slow_shard
        return 1.0 if isinstance(reducer, DeviceReducer) else 0.5 if is_fast else 2.0

    measured, library = fastest_sum._seconds, torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", counted, "CPU")
    with gpu_of_a_shard(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest_sum, "_seconds", seconds)
        if kind == "impossible for one":
            patch.setattr(shards, "_symmetric_memory", lambda place, *_: [buffers][place.shard])
        elif kind != "impossible":
            patch.setattr(shards, "_symmetric_memory", lambda *_: buffers)
        buffers = torch.zeros(ROWS[-1] * WIDTH, device=CUDA)
        link = link_on_devices(place, CUDA, 60.0)
        reducer = fastest_reducer(link, WIDTH, torch.float32, CUDA, 60.0)
        called.clear()
        sums = [float(reducer.all_reduce(torch.ones(rows, WIDTH, device=CUDA)).cpu().mean()) for rows in (1, 32, 64)]
        reducer.all_reduce(torch.ones(4, 4, dtype=torch.bfloat16, device=CUDA))  # another dtype: never one-shot
        gathered = reducer.all_gather(torch.ones(1, device=CUDA) * place.shard).cpu()
        assert gathered.tolist() == [[0.0], [1.0]]
        link.smallest(0)  # no shard closes its link before all shards have read
        link.close()
        return getattr(reducer, "max_numbers", 0) // WIDTH, sums, called


@pytest.mark.parametrize(
    ("kind", "slow_shard", "largest"),
    [
        ("faster", -1, FASTER_UP_TO),
        ("faster", 1, 0),  # slower on one of the shards
        ("wrong", -1, 0),
        pytest.param("cannot be captured", -1, 0, marks=pytest.mark.slow),
        pytest.param("impossible", -1, 0, marks=pytest.mark.slow),
        ("impossible for one", -1, 0),
        pytest.param("refused", -1, 0, marks=pytest.mark.slow),
    ],
)
def test_all_shards_choose_the_same_reducer(kind, slow_shard, largest):
    for actual, sums, called in run_shards(choose, 2, kind, slow_shard):
        assert actual == largest and sums == [2.0] * 3
        assert called == ([1, 32] if largest else [])
