"""The simulated GPU keeps CUDA's rules: what waits, what is refused, and when results are visible."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from support.simulated_gpu import Event, Gpu, Graph, Tensor, capturing, simulated_gpu

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as gpu:
        yield gpu


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there.index_select(0, torch.tensor([0])),
        lambda here, there: torch.stack([there[0], here[0]]),
        lambda here, there: here[there.long()],
        lambda here, there: there.index_put_((there.long(),), here),
        lambda here, there: there.numpy(),
        lambda here, there: torch.randn(3, device=CUDA, generator=torch.Generator()),
        lambda here, there: torch.tensor(here.numpy(), pin_memory=True),
    ],
)
def test_mixing_host_and_device_is_refused(gpu, mix):
    with pytest.raises((RuntimeError, TypeError)):
        mix(torch.ones(3), torch.ones(3, device=CUDA))


def test_host_scalars_may_be_mixed_with_device_tensors(gpu):
    there = torch.ones(3, device=CUDA)
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3  # tensors of one number may be on the host


def test_async_copy_is_visible_only_after_event_wait(gpu):
    there, here = torch.arange(3, device=CUDA), torch.empty(3, dtype=torch.int64, pin_memory=True)
    gpu.waits.clear()
    here.copy_(there, non_blocking=True)
    copied = Event()
    copied.record()
    assert not copied.query() and here.tolist() != [0, 1, 2] and not gpu.waits
    copied.synchronize()
    assert here.tolist() == [0, 1, 2] and gpu.waits == ["elsewhere"]
    copied.synchronize()
    assert len(gpu.waits) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_source_of_pending_copy_must_not_be_modified(gpu, waits):
    here = torch.zeros(3, pin_memory=True)
    there = here.to(CUDA, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    here.fill_(1)
    if waits:
        assert there.tolist() == [0.0] * 3
    else:
        with pytest.raises(AssertionError, match="written to before"):
            torch.cuda.synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there.sum().item(),
        lambda there: there.cpu(),
        lambda there: there.copy_(torch.ones(3)),
        lambda there: torch.tensor([1.0], device=CUDA),
        lambda there: torch.nonzero(there),
        lambda there: there[torch.tensor([0, 1])],
        lambda there: there[there > 0],
        lambda there: torch.repeat_interleave(there, there.long()),
        lambda there: torch.zeros(3, pin_memory=True).to(CUDA, torch.bfloat16, non_blocking=True),
        lambda there: torch.zeros(3, 3, pin_memory=True).T.to(CUDA, non_blocking=True),
    ],
)
def test_blocking_operations_are_counted_and_refused_in_capture(gpu, wait):
    there = torch.zeros(3, device=CUDA)
    gpu.waits.clear()
    there += 1
    wait(there)
    assert gpu.waits
    graph = Graph()
    with pytest.raises(RuntimeError, match="not permitted"), capturing(graph):
        wait(there)
    with pytest.raises(RuntimeError, match="not permitted"), capturing(graph):
        Event().query()


def test_uninitialized_memory_holds_invalid_values(gpu):
    assert torch.empty(3, device=CUDA).isnan().all()
    assert (torch.empty(3, dtype=torch.int64, device=CUDA) > 1 << 60).all()


def test_graph_computes_only_when_replayed(gpu):
    given, kept = torch.zeros(3, device=CUDA), torch.zeros(3, device=CUDA)
    graph, other, pool = Graph(), Graph(), object()
    with capturing(graph, pool=pool):
        made = given * 2
        kept += 1
    assert made.isnan().all() and kept.tolist() == [0.0] * 3
    for number in range(1, 3):
        given.fill_(number)
        graph.replay()
        assert made.tolist() == [2.0 * number] * 3 and kept.tolist() == [float(number)] * 3
    with capturing(other, pool=pool):
        given + 1
    other.replay()
    assert made.isnan().all()  # graphs of a pool share memory
    assert type(made) is Tensor
