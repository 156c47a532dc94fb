"""The exchange between real processes, over each transport that is available without GPUs."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked import forking, next_result
from support.processes import wait_until
from support.ranks import CPU, TIMEOUT, run_ranks, running_ranks

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.exchange import HEADER, Exchange, broadcast_object, gather_rows
from lp_runtime.distributed.partition.partition import partition
from lp_runtime.distributed.process_group import GroupOptions, existing_or_new_group, process_group
from lp_runtime.distributed.store import host_store
from lp_runtime.distributed.transport import shared_memory
from lp_runtime.distributed.transport.collectives import CollectiveTransport
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, StateMismatchError
from lp_runtime.lookahead.tree import TokenTree


def make_tree() -> TokenTree:
    tree = TokenTree([1, 2], max_depth=9)
    for branch in ([3, 4, 5], [3, 6], [7, 8, 9], [10]):
        tree.add_branch(branch)
    return tree


def gather(exchange: Exchange, digest: int = 5, control: int = 0, offset: int = 0):
    """Exchange the values 100 * node + offset of the nodes that this rank owns."""
    tree = make_tree()
    shares = partition(tree, [1.0] * exchange.group.size)
    values = torch.tensor([[100 * node + offset] for node in shares[exchange.group.rank].owned], dtype=torch.int64)
    return exchange.all_gather(shares, values, digest, control)


def three_ranks(group: Group):
    """Run three steps on one exchange, a broadcast, and a step in which rank 1's state has diverged."""
    rank = group.rank
    exchange = Exchange(group, capacity=12)
    outcomes = [
        gather(exchange),
        gather(exchange, offset=1, control=rank),
        gather(exchange, digest=2**56 - 1, offset=2),
    ]
    value = broadcast_object({"rank": rank, "ids": list(range(1000))}, group)
    try:
        gather(exchange, digest=7 if rank == 1 else 6)
    except ReplicaError as error:
        return outcomes, exchange.bytes_sent, value, error


BACKENDS = ("shared", "gloo", "two machines")


@pytest.fixture(scope="module", params=BACKENDS)
def three_results(request):
    return run_ranks(three_ranks, 3, backend=request.param)


def test_all_replicas_receive_every_value_and_control_bit(three_results):
    tree = make_tree()
    for outcomes, bytes_sent, _, _ in three_results:
        for offset, outcome in enumerate(outcomes):
            expected = [-1] * tree.root + [100 * node + offset for node in range(tree.root, len(tree))]
            assert outcome.values[:, 0].tolist() == expected
        assert [outcome.control for outcome in outcomes] == [0, 0 | 1 | 2, 0]
        assert bytes_sent == 4 * 8 * (HEADER + 12)  # the steps' nodes are rounded up to the capacity


def test_broadcast_returns_rank_0s_value_on_all_ranks(three_results):
    assert [value for _, _, value, _ in three_results] == [{"rank": 0, "ids": list(range(1000))}] * 3


def test_digest_mismatch_raises_on_all_replicas(three_results):
    for *_, error in three_results:
        assert type(error) is StateMismatchError
        assert "rank 0 0x6, rank 1 0x7, rank 2 0x6" in str(error)
        assert len(str(error).splitlines()) == 1


def lose_rank_1(group: Group):
    """Kill rank 1 between two steps; afterwards the other ranks also try to broadcast."""
    rank = group.rank
    exchange = Exchange(group, capacity=12)
    gather(exchange)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for attempt in (
        lambda: gather(exchange),
        lambda: broadcast_object("value", group),
    ):
        try:
            attempt()
        except Exception as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_peer_of_a_killed_replica_gets_an_error(backend):
    with running_ranks(lose_rank_1, 2, backend=backend) as (processes, results):
        rank, errors = next_result(results, processes)
        processes[1].join(TIMEOUT)
        assert processes[1].exitcode == -signal.SIGKILL
    assert rank == 0
    assert [type(error) for error in errors] == [ReplicaError, ReplicaError]
    for error in errors:
        assert str(error).startswith("rank 0 lost a peer")
        assert len(str(error).splitlines()) == 1


HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


@pytest.mark.parametrize(
    ("error", "is_lost_peer"),
    [
        (torch.AcceleratorError("illegal access"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError(HOST_MEMORY), False),
        (RuntimeError("connection closed by peer"), True),
    ],
)
def test_local_errors_are_not_reported_as_a_lost_peer(monkeypatch, error, is_lost_peer):
    def fails(*_):
        raise error

    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, fails, raising=False)
    group = Group(0, 2, CollectiveTransport("gloo", 0, CPU, TIMEOUT))
    with pytest.raises(ReplicaError if is_lost_peer else type(error)) as raised:
        gather(Exchange(group, capacity=12))
    assert (raised.value is error) == (not is_lost_peer)


STEP_TIMEOUT = 1.0  # seconds; after the wait, a busy machine must answer within it


def wait_for_a_request(group: Group):
    """Broadcast a request from rank 0 after more than the step timeout."""
    if group.rank == 0:
        time.sleep(2 * STEP_TIMEOUT)
    return group.connected.broadcast(b"a request" if group.rank == 0 else None, is_patient=True)


@pytest.mark.parametrize("backend", ["shared", "gloo", pytest.param("two machines", marks=pytest.mark.slow)])
def test_followers_wait_for_a_request_past_the_step_timeout(backend):
    with running_ranks(wait_for_a_request, 2, backend=backend, step_timeout=STEP_TIMEOUT) as (processes, results):
        assert [next_result(results, processes)[1] for _ in range(2)] == [b"a request", b"a request"]


def test_single_replica_needs_no_process_group():
    with process_group(ReplicaContext(), CPU, GroupOptions(TIMEOUT)) as group:
        assert group == Group.alone() and group.is_alone
        exchange = Exchange(group, capacity=10)
        outcome = gather(exchange, control=2)
        assert not torch.distributed.is_initialized()
    assert outcome.values[:, 0].tolist() == [-1, *(100 * node for node in range(1, len(make_tree())))]
    assert outcome.control == 2
    assert gather(exchange).control == 0
    value = object()
    assert broadcast_object(value, Group.alone()) is value


def test_occupied_port_raises_one_line_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}") as caught:
            host_store("127.0.0.1", port, 1.0)
    assert len(str(caught.value).splitlines()) == 1


def test_host_of_another_machine_raises_one_line_error():
    with pytest.raises(LaunchError, match="192.0.2.1:0") as caught:
        host_store("192.0.2.1", 0, 1.0)  # an address that is reserved for documentation
    assert len(str(caught.value).splitlines()) == 1


def test_incomplete_group_raises_one_line_error():
    store = host_store("127.0.0.1", 0, 1.0)
    with (
        pytest.raises(LaunchError, match="rank 0 of 2 could not join") as caught,
        process_group(ReplicaContext(0, 2, host="127.0.0.1", port=store.port), CPU, GroupOptions(0.1), store),
    ):
        pass
    assert len(str(caught.value).splitlines()) == 1
    assert not torch.distributed.is_initialized()


def test_missing_torchrun_variables_suggest_the_command(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match="RANK is not set.*torchrun --nproc-per-node"):
        ReplicaContext.from_torchrun()


def test_context_is_read_from_torchrun_variables(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    values = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 29500}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "node0")
    for visible in (None, "0,1,2,3", "", "-1"):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert ReplicaContext.from_torchrun() == ReplicaContext(5, 8, 1, 4, "node0", 29500)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "0", "must be a number from 1 to 1000000"),
        ("WORLD_SIZE", "9" * 5000, "must be a number from 1 to 1000000"),
        ("RANK", "8", "must be a number from 0 to 7"),
        ("RANK", "-1", "must be a number from 0 to 7"),
        ("LOCAL_WORLD_SIZE", "9", "must be a number from 1 to 8"),
        ("LOCAL_RANK", "x", "must be a number from 0 to 3"),
        ("MASTER_PORT", "65536", "must be a number from 1 to 65535"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "must be a number from 0 to 1000000"),
    ],
)
def test_torchrun_variable_out_of_range_is_one_line(monkeypatch, name, value, message):
    values = {
        "RANK": 5,
        "WORLD_SIZE": 8,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 4,
        "MASTER_PORT": 29500,
        "MASTER_ADDR": "a",
    }
    for each, number in {**values, name: value}.items():
        monkeypatch.setenv(each, str(number))
    with pytest.raises(LaunchError, match=f"^launcher=torchrun: {name}={value}: {message}$"):
        ReplicaContext.from_torchrun()


@pytest.mark.parametrize(("visible", "num_local", "index", "owns"), [("3", 4, 0, True), ("GPU-7", 1, 0, False)])
def test_single_visible_gpu_is_used(monkeypatch, visible, num_local, index, owns):
    """`srun --gpus-per-task=1` starts processes that way."""
    values = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": min(2, num_local - 1), "LOCAL_WORLD_SIZE": num_local}
    for name, value in {
        **values,
        "MASTER_PORT": 29500,
        "MASTER_ADDR": "node0",
        "CUDA_VISIBLE_DEVICES": visible,
    }.items():
        monkeypatch.setenv(name, str(value))
    context = ReplicaContext.from_torchrun()
    assert (context.device_index, context.owns_device, context.num_local) == (index, owns, num_local)


def test_nccl_is_refused_on_a_cpu():
    with (
        pytest.raises(LaunchError, match="launcher.backend=nccl: this replica is on cpu"),
        process_group(ReplicaContext(), CPU, GroupOptions(TIMEOUT, backend="nccl")),
    ):
        pass


def where(group: Group):
    return group.connected.name


def test_transport_is_chosen_by_machines_and_backend():
    assert run_ranks(where, 2) == ["shared", "shared"]
    assert run_ranks(where, 3, backend="two machines") == ["shared and network"] * 3
    assert run_ranks(where, 2, backend="two machines") == ["gloo", "gloo"]
    assert run_ranks(where, 2, backend="gloo") == ["gloo", "gloo"]


def refused(rank: int, port: int, results) -> None:
    context = ReplicaContext(rank, 2, host="127.0.0.1", port=port)
    options = GroupOptions(TIMEOUT, backend="shared", machine=f"machine {rank}")
    try:
        with process_group(context, CPU, options):
            results.put("formed")
    except LaunchError as error:
        results.put(str(error))


def test_shared_backend_across_machines_is_refused():
    store, results = host_store("127.0.0.1", 0, TIMEOUT), forking().Queue()
    processes = [forking().Process(target=refused, args=(rank, store.port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    actual = [next_result(results, processes) for _ in processes]
    for process in processes:
        process.join(TIMEOUT)
    assert actual == ["launcher.backend=shared: the replicas are on 2 machines"] * 2


def without_shared_memory(rank: int, port: int, folder: str, results) -> None:
    context = ReplicaContext(rank, 2, host="127.0.0.1", port=port)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lp_runtime.distributed.process_group").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "FOLDER", Path(folder))
        with process_group(context, CPU, GroupOptions(TIMEOUT)) as group:
            results.put((rank, group.connected.name, gather_rows(np.array([rank]), group).tolist(), records))


def test_missing_shared_memory_falls_back_to_gloo(tmp_path):
    folder = str(tmp_path / "absent")
    store, results = host_store("127.0.0.1", 0, TIMEOUT), forking().Queue()
    processes = [
        forking().Process(target=without_shared_memory, args=(rank, store.port, folder, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    actual = sorted(next_result(results, processes) for _ in processes)
    for process in processes:
        process.join(TIMEOUT)
    why = f"{folder}: No such file or directory"
    says = f"launcher.backend=auto: memory cannot be shared ({why}); using the network"
    assert actual == [(0, "gloo", [[0], [1]], [says]), (1, "gloo", [[0], [1]], [])]


def find_the_group(group: Group):
    with existing_or_new_group(CPU, TIMEOUT) as actual:
        return actual.rank, actual.size, actual.connected.name, gather_rows(np.array([actual.rank]), actual).tolist()


def test_existing_process_group_is_used():
    assert run_ranks(find_the_group, 2, backend="gloo") == [(rank, 2, "gloo", [[0], [1]]) for rank in range(2)]


def test_leaving_rank_waits_until_all_ranks_have_connected(monkeypatch):
    """Otherwise it would close connections that a slower rank is still opening."""
    events = []

    def connect(backend, rank, store, **kwargs):
        if rank == 0:
            wait_until(lambda: store.add("formed", 0) == 1)  # rank 1 has connected
            events.append("rank 0 has connected")

    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("a rank leaves"))

    def join_and_leave(rank: int) -> None:
        with process_group(ReplicaContext(rank, 2), CPU, GroupOptions(TIMEOUT, backend="gloo"), store):
            pass

    store = dist.HashStore()
    threads = [threading.Thread(target=join_and_leave, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert events == ["rank 0 has connected", "a rank leaves", "a rank leaves"]


class StoreWithPeer(dist.Store):
    """A store in which a second rank joins whenever this one does; its counter "formed" is that of `add_formed`."""

    def __init__(self, add_formed: Callable[[int], int]):
        super().__init__()
        self._counters, self._add_formed = dist.HashStore(), add_formed

    def add(self, key: str, amount: int) -> int:
        return self._add_formed(amount) if key.endswith("/formed") else self._counters.add(key, 2 * amount)


@pytest.fixture
def lone_default_group(monkeypatch) -> Iterator[None]:
    """Make the default group one of this process alone, whatever its size should be."""
    init = dist.init_process_group

    def init_alone(backend, **kwargs):
        init(backend, store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(dist, "init_process_group", init_alone)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("lone_default_group")
def test_store_lost_while_a_group_forms_does_not_prevent_later_groups():
    def lose(amount: int) -> int:
        raise dist.DistNetworkError("connection reset by peer")

    store = StoreWithPeer(lose)
    for _ in range(2):
        with process_group(ReplicaContext(0, 2), CPU, GroupOptions(TIMEOUT, backend="gloo"), store) as group:
            assert group.size == 2 and dist.is_initialized()
        assert not dist.is_initialized()


@pytest.mark.usefixtures("lone_default_group")
def test_group_interrupted_while_it_forms_is_left():
    def interrupt() -> bool:
        if dist.is_initialized():
            raise KeyboardInterrupt
        return False

    options = GroupOptions(TIMEOUT, backend="gloo")
    with (
        pytest.raises(KeyboardInterrupt),
        process_group(ReplicaContext(0, 2), CPU, options, StoreWithPeer(lambda amount: 1), interrupt),
    ):
        pass
    assert not dist.is_initialized()


def test_replica_whose_leader_cannot_join_learns_that_it_is_gone(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("connection refused")

    def join(rank: int) -> None:
        options = GroupOptions(TIMEOUT, machine=f"machine {rank == 2}")
        try:
            with process_group(ReplicaContext(rank, 3), CPU, options, store) as group:
                errors[rank] = gather_rows(np.array([rank]), group)
        except LookaheadError as error:
            errors[rank] = error

    monkeypatch.setattr(dist, "init_process_group", fail)
    store, errors = dist.HashStore(), {}
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert [type(errors[rank]) for rank in range(3)] == [LaunchError, ReplicaError, LaunchError]
    assert str(errors[1]) == "rank 1 lost a peer in the exchange: rank 0 is gone"
