"""The exchange over shared memory, in addition to the tests of all transports in test_exchange.py."""

import errno
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from support.forked import forking, next_result
from support.ranks import CPU, TIMEOUT, run_ranks, running_ranks

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.exchange import Exchange, broadcast_object, gather_rows
from lp_runtime.distributed.partition.partition import partition
from lp_runtime.distributed.process_group import GroupOptions, new_segment_name, process_group
from lp_runtime.distributed.transport import shared_memory
from lp_runtime.distributed.transport.group import Group, Transport
from lp_runtime.distributed.transport.shared_memory import BUFFER_WORDS, FOLDER, why_unavailable
from lp_runtime.errors import LaunchError, ReplicaError
from lp_runtime.lookahead.tree import TokenTree

OWN = f"-of-{os.getpid()}-"
STEP_TIMEOUT = 0.2  # seconds; for tests of the timeout itself


def own_segment_name() -> str:
    """Return a segment name that identifies this process, because other tests run at the same time."""
    return new_segment_name() + OWN


def segments() -> list[str]:
    """Return the names of this process's segments that exist in shared memory."""
    return [path.name for path in FOLDER.glob(f"lp_runtime-*{OWN}*")]


def joined(rank: int, num_replicas: int, segment: str, is_abandoned=lambda: False, step_timeout: float | None = None):
    options = GroupOptions(TIMEOUT, step_timeout)
    return process_group(ReplicaContext(rank, num_replicas, segment=segment), CPU, options, None, is_abandoned)


def of_threads(task, num_replicas: int = 2, step_timeout: float | None = None) -> list:
    """Run `task(group)` in a thread for each rank; return what each thread returned or raised."""
    segment, results = own_segment_name(), [None] * num_replicas

    def work(rank: int) -> None:
        try:
            with joined(rank, num_replicas, segment, step_timeout=step_timeout) as group:
                results[rank] = task(group)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    return results


@pytest.mark.parametrize("size", [1, BUFFER_WORDS - 1, BUFFER_WORDS, BUFFER_WORDS + 1, 3 * BUFFER_WORDS])
def test_rows_of_any_size_are_gathered(size):
    """Rows that are larger than a buffer take several rounds."""

    def task(group: Group):
        return [gather_rows(np.arange(size) * 10 + group.rank + step, group) for step in range(3)]

    for actual in of_threads(task, 3):
        for step, rows in enumerate(actual):
            assert (rows == np.arange(size) * 10 + np.arange(3)[:, None] + step).all()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8 * BUFFER_WORDS - 1, 8 * BUFFER_WORDS + 1])
def test_values_of_any_size_are_broadcast(size):
    value = bytes(i % 251 for i in range(size))
    assert of_threads(lambda group: broadcast_object(value if group.rank == 0 else None, group)) == [value, value]


def many_rounds(group: Group, num_rounds: int) -> bool:
    """Return whether every row of many rounds was its replica's; replicas are slow at random."""
    transport, rng = group.connected, np.random.default_rng(group.rank)
    sent, received = torch.empty(40, dtype=torch.int64), torch.empty(group.size * 40, dtype=torch.int64)
    for number in range(num_rounds):
        sent[:] = 1000 * number + group.rank
        if rng.random() < 0.01:
            os.sched_yield()
        transport.all_gather(received, sent)
        if not (received.reshape(group.size, 40) == (1000 * number + torch.arange(group.size))[:, None]).all():
            return False
    return True


def test_rows_are_never_torn_or_stale():
    assert run_ranks(many_rounds, 3, 1500, backend="shared") == [True, True, True]


def test_segment_is_unlinked_after_the_group_has_formed():
    before = segments()
    assert of_threads(lambda group: segments()) == [before, before]


@pytest.mark.slow
def test_thousand_groups_leak_no_resources():
    process = psutil.Process()

    def sizes() -> tuple[int, int, list[str]]:
        return process.num_fds(), sum("lp_runtime-" in each.path for each in process.memory_maps()), segments()

    of_threads(lambda group: None)
    before = sizes()
    for _ in range(1000):
        segment = own_segment_name()
        with joined(0, 1, segment):
            pass
        assert of_threads(lambda group: gather_rows(np.array([group.rank]), group).tolist()) == [[[0], [1]]] * 2
    (fds, *rest), (fds_before, *rest_before) = sizes(), before
    # Garbage of earlier tests may be collected meanwhile, but leaks of a thousand groups would be more than that.
    assert fds <= fds_before and rest == rest_before


def test_peer_that_leaves_is_reported_at_once():
    left = threading.Event()

    def task(group: Group):
        if group.rank == 0:
            return left.set()
        left.wait(TIMEOUT)
        return gather_rows(np.array([1]), group)

    _, error = of_threads(task)
    assert isinstance(error, ReplicaError) and str(error) == "rank 1 lost a peer in the exchange: rank 0 is gone"


def test_rows_sent_before_leaving_are_received():
    gathered = of_threads(lambda group: gather_rows(np.array([group.rank]), group).tolist(), 3)
    assert gathered == [[[0], [1], [2]]] * 3


def test_unresponsive_peer_raises_after_the_step_timeout():
    over = threading.Event()

    def task(group: Group):
        if group.rank == 0:
            over.wait(TIMEOUT)
            return None
        try:
            return gather_rows(np.array([1]), group)
        finally:
            over.set()

    _, error = of_threads(task, step_timeout=STEP_TIMEOUT)
    assert str(error) == "rank 1 lost a peer in the exchange: rank 0 did not answer within 0.2 s"


def test_patient_wait_outlasts_the_step_timeout():
    """A patient wait lasts as long as the peers are alive, because followers wait for the next request."""
    waiting = threading.Event()

    def task(group: Group):
        if group.rank == 0:
            waiting.wait(TIMEOUT)
            return group.connected.broadcast(b"a request", is_patient=True)
        threading.Timer(3 * STEP_TIMEOUT, waiting.set).start()
        return group.connected.broadcast(None, is_patient=True)

    assert of_threads(task, step_timeout=STEP_TIMEOUT) == [b"a request", b"a request"]


def test_abort_by_another_thread_ends_a_wait():
    over = threading.Event()

    def task(group: Group):
        if group.rank == 0:
            over.wait(TIMEOUT)
            return None
        threading.Timer(0.01, group.connected.abort).start()
        try:
            return group.connected.broadcast(None, is_patient=True)
        finally:
            over.set()

    _, error = of_threads(task)
    assert str(error) == "rank 1 lost a peer in the exchange: the group was aborted"


def be_killed(group: Group, sign: int):
    """Kill rank 1, which does not leave the group, while rank 0 waits patiently for it."""
    gather_rows(np.array([group.rank]), group)
    if group.rank == 1:
        os.kill(os.getpid(), sign)
    try:
        group.connected.broadcast(b"", is_patient=True)
        gather_rows(np.array([group.rank]), group)
    except ReplicaError as error:
        return str(error)


def test_killed_process_is_detected_without_a_timeout():
    """The process is still a zombie, because its parent has not waited for it yet."""
    with running_ranks(be_killed, 2, signal.SIGKILL, backend="shared") as (processes, results):
        assert next_result(results, processes) == (0, "rank 0 lost a peer in the exchange: rank 1 is gone")


def die_in_another_container(segment: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "PID_NAMESPACE", Path("/proc/self/ns/uts"))  # any other file
        with joined(1, 2, segment):
            os._exit(0)


def test_process_numbers_of_another_container_are_not_looked_up():
    """A process with the same number may end here while the peer goes on."""
    segment = own_segment_name()
    peer = forking().Process(target=die_in_another_container, args=(segment,), daemon=True)
    peer.start()
    with joined(0, 2, segment, step_timeout=STEP_TIMEOUT) as group:
        peer.join(TIMEOUT)
        with pytest.raises(ReplicaError, match=f"rank 1 did not answer within {STEP_TIMEOUT} s"):
            group.connected.broadcast(b"", is_patient=False)


def test_rows_of_different_lengths_raise():
    errors = of_threads(lambda group: gather_rows(np.arange(3 + group.rank), group))
    assert {str(each).partition(": ")[2] for each in errors} == {"replicas sent different numbers of integers, [3, 4]"}


def test_missing_replicas_raise_one_line_error():
    before = segments()
    alone = joined(0, 3, own_segment_name(), is_abandoned=lambda: True)
    with pytest.raises(LaunchError, match="rank 0 of 3 .*: 2 of them did not join$") as caught, alone:
        pass
    assert len(str(caught.value).splitlines()) == 1 and segments() == before


def test_full_or_missing_shared_memory_is_reported(monkeypatch, tmp_path):
    assert why_unavailable(2) is None
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "absent")
    assert why_unavailable(2) == f"{tmp_path / 'absent'}: No such file or directory"
    with pytest.raises(LaunchError, match="absent: No such file or directory"), joined(0, 2, "lp_runtime-test"):
        pass

    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    assert why_unavailable(2) == f"{tmp_path}: No space left on device"
    assert not list(tmp_path.iterdir())


def test_symbolic_link_is_not_followed(tmp_path):
    target, segment = tmp_path / "target", own_segment_name()
    target.write_text("another's")
    (FOLDER / segment).symlink_to(target)
    with pytest.raises(LaunchError, match="Too many levels of symbolic links"), joined(0, 2, segment):
        pass
    assert target.read_text() == "another's"


class Permuted(Transport):
    """Returns the rows of two replicas in the wrong order, as an NCCL all-gather was reported to do."""

    def __init__(self):
        super().__init__("permuted", CPU)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        other = sent.clone()
        other[0] += 1 << 56  # rank 1's
        received.copy_(torch.cat([other, sent]))

    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        raise NotImplementedError

    def abort(self) -> None:
        """Do nothing: no thread waits."""

    def close(self) -> None:
        """Do nothing: no resource is held."""


def test_rows_in_wrong_order_raise():
    tree = TokenTree([1], max_depth=9)
    tree.add_branch([3, 4])
    shares = partition(tree, [1.0, 1.0])
    exchange = Exchange(Group(0, 2, Permuted()), capacity=12)
    values = torch.zeros(shares.num_owned[0], 1, dtype=torch.int64)
    with pytest.raises(ReplicaError, match=r"rank 0 received the replicas' rows in the order \[1, 0\]"):
        exchange.all_gather(shares, values, 5, 0)


@pytest.mark.parametrize(
    ("cores", "announced", "latest", "most_polls"),
    [
        (1, 2e-3, 1e-4, 200),
        (1, 7e-3, 1e-4, 300),
        (1, 0.019, 1e-4, 500),
        (1, 1.0, 2e-3, 2000),
        (2, 2e-3, 1e-5, 500),
        (2, 0.019, 1e-5, 4000),
        (2, 1.0, 2e-3, 5000),
    ],
)
def test_patient_wait_responds_quickly_and_polls_rarely(cores, announced, latest, most_polls, monkeypatch):
    """Long waits poll rarely, and short ones, too, if two replicas share a core.

    The clock is simulated: a yield takes 5 us, and a sleep takes 55 us longer than requested.
    """
    monkeypatch.setattr(shared_memory, "num_cores", lambda: cores)
    transports: dict[int, Transport] = {}
    ready = threading.Barrier(3)
    done = threading.Event()

    def task(group: Group) -> None:
        transports[group.rank] = group.transport
        ready.wait(TIMEOUT)
        done.wait(TIMEOUT)

    groups = threading.Thread(target=of_threads, args=(task,))
    groups.start()
    ready.wait(TIMEOUT)
    now, heard, num_polls, has_announced = 0.0, 0.0, 0, False

    def pass_time(seconds: float) -> None:
        nonlocal now, num_polls, has_announced
        now += seconds
        num_polls += 1
        if now >= announced and not has_announced:
            has_announced = True
            transports[0].broadcast(b"", is_patient=False)

    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: pass_time(seconds + 5.5e-5))
    yielding = SimpleNamespace(**vars(os) | {"sched_yield": lambda: pass_time(5e-6)})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "time", clock)
            patch.setattr(shared_memory, "os", yielding)
            transports[1].broadcast(None, is_patient=True)
            heard = now
    finally:
        done.set()
        groups.join(TIMEOUT)
    assert 0 <= heard - announced <= latest and num_polls <= most_polls
