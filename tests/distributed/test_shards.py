"""All-reduces and announcements between the shards of a replica."""

from __future__ import annotations

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.shards import run_shards
from support.simulated_gpu import simulated_gpu
from support.thinned import thinned

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.reducers import CollectiveReducer, HostReducer, Reducer
from lp_runtime.distributed.shards import (
    BUFFER_WORDS,
    FOLDER,
    ShardLink,
    ShardPlace,
    clear_up,
    loading_group,
    meet_in_store,
    said_by_first,
    shard_group,
)
from lp_runtime.errors import LaunchError, PassFailedError, ShardError

CPU = torch.device("cpu")
SHAPES = [(1,), (3, 5), (1, 7, 33), (2, BUFFER_WORDS + 3)]


def tensors(shard: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shard)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def reduce_all(place: ShardPlace, kind: str, dtype: torch.dtype) -> tuple[list, list, int]:
    link = ShardLink(place, CPU, 60.0)
    reducer: Reducer = link.reducer
    if kind == "gloo":
        reducer = CollectiveReducer(shard_group(place, "gloo", 60.0), place.num_shards)
    if kind == "host":
        reducer = HostReducer(link.reducer)
    transposed = tensors(place.shard, dtype)[1].t()  # not contiguous
    sums = [reducer.all_reduce(each.clone()) for each in tensors(place.shard, dtype)] + [reducer.all_reduce(transposed)]
    gathered = [reducer.all_gather(each) for each in tensors(place.shard, dtype)]
    smallest = link.smallest(10 - place.shard)
    link.smallest(0)  # no shard closes its link before all shards have read
    link.close()
    return sums, gathered, smallest


@pytest.mark.parametrize(
    ("kind", "shards"), thinned(2, ["gloo", "shared", "host"], [(torch.float32, 2), (torch.bfloat16, 3)])
)
def test_reductions_are_correct_and_equal_on_all_shards(kind, shards):
    dtype, num_shards = shards
    actual = run_shards(reduce_all, num_shards, kind, dtype)
    inputs = [tensors(shard, dtype) for shard in range(num_shards)]
    inputs = [[*each, each[1].t()] for each in inputs]
    for sums, gathered, smallest in actual:
        assert smallest == 10 - (num_shards - 1)
        for index, total in enumerate(sums):
            exact = sum(each[index].double() for each in inputs)
            tolerance = 1e-6 if dtype is torch.float32 else 3e-2
            assert total.dtype is dtype and torch.allclose(total.double(), exact, atol=tolerance, rtol=tolerance)
            assert torch.equal(total, actual[0][0][index])
        for index, rows in enumerate(gathered):
            assert torch.equal(rows, torch.stack([each[index] for each in inputs]))


class OnDevice(Reducer):
    """A reducer whose sums make the GPU wait; `num_calls` sums have begun."""

    can_capture = True

    def __init__(self, num_calls: int):
        self.num_calls = num_calls

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not called")

    all_gather = all_reduce


def end_or_fail(place: ShardPlace, num_calls: list[int], failing: int) -> str:
    link = ShardLink(place, CPU, 60.0)
    link.reducer = OnDevice(num_calls[place.shard])
    try:
        link.fail_pass() if place.shard == failing else link.end_pass()
        actual = "left"
    except (PassFailedError, ShardError) as error:
        actual = str(error)
    link.smallest(0)  # all shards take part in the next exchange again
    return actual


@pytest.mark.parametrize(
    ("num_calls", "expected"),
    [
        ([7, 7], ["a forward pass has failed on another shard", "left"]),
        ([9, 7], ["a pass has failed on some GPUs of the replica, after [9, 7] sums"] * 2),
    ],
)
def test_failed_pass_ends_the_replica_only_if_sum_counts_differ(num_calls, expected):
    assert run_shards(end_or_fail, 2, num_calls, 1) == expected


def test_half_precision_sum_is_rounded_once():
    """In bfloat16, 1 + 2^-8 + 2^-8 is 1 + 2^-7 if rounded once; 1 + 2^-8 is rounded to 1."""
    assert run_shards(sum_of_three, 3) == [1.0078125] * 3


def sum_of_three(place: ShardPlace) -> float:
    link = ShardLink(place, CPU, 60.0)
    total = link.reducer.all_reduce(torch.tensor([(1.0, 2**-8, 2**-8)[place.shard]], dtype=torch.bfloat16))
    link.smallest(0)
    link.close()
    return float(total)


def talk(place: ShardPlace) -> object:
    link = ShardLink(place, CPU, 60.0)
    if place.is_leader:
        link.announce({"pass": list(range(9999))})
        link.close()
        return None
    heard = link.listen()
    try:
        link.listen()
    except ShardError as error:
        return heard, str(error)


def test_followers_receive_announcements_and_the_loss_of_shard_0():
    _, (heard, reason), (also, _) = run_shards(talk, 3)
    assert heard == also == {"pass": list(range(9999))}
    assert "a shard of the replica is gone: " in reason and "rank 0 is gone" in reason


def sum_on_one_gpu(place: ShardPlace) -> tuple[bool, list[float]]:
    with simulated_gpu():
        device = torch.device("cuda", 0)
        link = ShardLink(place, device, 60.0)
        total = link.reducer.all_reduce(torch.ones(3, device=device) + place.shard)
        assert total.device == device
        link.smallest(0)
        link.close()
        return isinstance(link.reducer, HostReducer), total.cpu().tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_shards_sharing_a_gpu_reduce_on_the_host():
    """NCCL refuses two ranks on one GPU."""
    assert run_shards(sum_on_one_gpu, 2) == [(True, [3.0] * 3)] * 2


def leave_in_a_sum(place: ShardPlace) -> str:
    link = ShardLink(place, CPU, 60.0)
    if place.shard == 1:
        link.close()
        return ""
    try:
        link.reducer.all_reduce(torch.ones(3))
    except ShardError as error:
        return str(error)


def test_sum_with_a_lost_shard_raises():
    assert "rank 1 is gone" in run_shards(leave_in_a_sum, 2)[0]


def fail_to_load(place: ShardPlace) -> None:
    with loading_group(place, CPU, 60.0):
        torch.distributed.barrier()  # both shards have joined
        raise ValueError("the output size is odd")


def test_loading_error_is_passed_on_unchanged():
    assert [str(error) for error in run_shards(fail_to_load, 2)] == ["the output size is odd"] * 2


def meet_nobody(place: ShardPlace) -> None:
    if place.is_leader:
        with loading_group(place, CPU, 0.1):
            pass


def test_shards_that_do_not_meet_raise_launch_error():
    error, _ = run_shards(meet_nobody, 2)
    assert isinstance(error, LaunchError) and str(error).startswith("shard 0 of 2 could not meet the others: ")


def test_files_of_killed_shards_are_removed():
    for name in ("lp_runtime-test", "lp_runtime-test-load", "lp_runtime-test-sums"):
        (FOLDER / name).touch()
    clear_up("lp_runtime-test")
    assert not list(FOLDER.glob("lp_runtime-test*"))


def ranks_without_agent(number: int) -> list[ReplicaContext]:
    """Return the contexts of ranks whose store rank 0 hosts, as with `srun`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [ReplicaContext(rank, number, port=port, hosts_store=rank == 0) for rank in range(number)]


def test_store_of_rank_0_serves_a_replica_that_comes_later():
    segments = [meet_in_store(context, 0, 1, 60.0, 60.0).segment for context in ranks_without_agent(2)]
    assert len(set(segments)) == 2


def test_only_rank_0_waits_for_all_ranks_to_read():
    """The process of rank 0, and the store with it, may end as soon as all have read."""
    contexts = ranks_without_agent(3)

    def heard(rank: int) -> str:
        return said_by_first(contexts[rank], "split", lambda: "2", 60.0, rank, 3)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(heard, 0)
        assert heard(1) == "2" and not first.done()
        assert heard(2) == first.result() == "2"
