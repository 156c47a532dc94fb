"""Tests of the replica pool when it loses a replica whose process takes time to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import pytest
from support.processes import wait_until

from lp_runtime.config.settings import FailureConfig
from lp_runtime.errors import LaunchError, ModelError, ShardError
from lp_runtime.launchers.driver import replica_pool
from lp_runtime.launchers.driver.replica_pool import ReplicaPool
from lp_runtime.launchers.wire.messages import Failed, ModelLoaded
from lp_runtime.launchers.worker.process_host import ProcessHost


class SlowlyEndingHost(ProcessHost):
    """A host of simulated processes: a killed one has ended once `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.started: list[int] = []
        self.said: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self.together: SimpleQueue[list[tuple[int, object]]] = SimpleQueue()  # messages that arrive at the same time
        self.num_refused = 0  # starts of a process that fail
        self.is_closed = False

    def start_process(self, index: int) -> None:
        assert not self.is_closed
        if self.num_refused:
            self.num_refused -= 1
            raise OSError("cannot allocate memory")
        self.started.append(index)

    def send(self, index: int, message: object) -> None:
        raise AssertionError("nothing is ordered")

    def receive(self, timeout: float) -> list[tuple[int, object]]:
        if not self.together.empty():
            return self.together.get()
        try:
            return [self.said.get(timeout=timeout)]
        except Empty:
            return []

    def kill(self, index: int) -> Callable[[], None]:
        return lambda: assert_true(self.may_end.wait(60))

    def rendezvous(self, members: Sequence[int]) -> None:
        return None

    def close(self) -> None:
        self.is_closed = True


def assert_true(value: bool) -> None:
    assert value


@pytest.fixture
def host() -> SlowlyEndingHost:
    return SlowlyEndingHost()


@pytest.fixture
def pool(host) -> Iterator[ReplicaPool]:
    """Yield a pool of two ready replicas that may each be restarted once."""

    pool = ReplicaPool(host, 2, FailureConfig(restarts=1))
    for index in range(2):
        host.said.put((index, ModelLoaded()))
    pool.start(60)
    yield pool
    host.may_end.set()
    pool.close()


UNMET = Failed.from_error(LaunchError("shard 1 of 2 could not meet the others: Connection closed by peer"))
LOST = Failed.from_error(ShardError("a shard of the replica is gone"))
ENDED = Failed("the process of its shard 0 ended (exit status 1)")
FULL = Failed.from_error(ModelError("model.path=X: not enough memory on cuda:0"))
BROKEN = Failed.from_error(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(
    ("failures", "grace", "reported"),
    [
        ([UNMET, ENDED, FULL], 300.0, FULL),  # the other shard's failure arrives last
        ([LOST, FULL], 300.0, FULL),
        ([UNMET, BROKEN], 300.0, BROKEN),
        ([LOST, BROKEN], 300.0, BROKEN),
        ([FULL, UNMET, ENDED], 300.0, FULL),
        ([UNMET, ENDED], 0.1, UNMET),  # nothing better comes
    ],
)
def test_start_reports_the_shard_that_failed_first(host, monkeypatch, failures, grace, reported):
    monkeypatch.setattr(replica_pool, "CAUSE_GRACE_SECONDS", grace)
    pool = ReplicaPool(host, 1, FailureConfig())
    for failure in failures:
        host.said.put((0, failure))
    with pytest.raises(reported.kind or LaunchError) as caught:
        pool.start(300)
    assert str(caught.value) == f"rank 0 failed at start: {reported.message}"
    pool.close()


def test_lose_does_not_wait_for_the_process_to_end(host, pool):
    pool.lose(0, "it did not answer", 0)  # returns before the process has ended
    assert pool.ready == {1} and pool.num_loading == 1
    host.said.put((1, Failed("its process ended", None)))  # the pool keeps listening
    wait_until(lambda: not pool.ready)
    assert pool.why_lost() == "replica 0: it did not answer; replica 1: its process ended"
    assert host.started == [0, 1]  # no process is started before the lost one has ended
    host.may_end.set()
    wait_until(lambda: sorted(host.started[2:]) == [0, 1])
    assert pool.num_restarts == {0: 1, 1: 1}


def test_wait_for_a_replica_ends_with_the_request_and_with_the_pool(host, pool):
    for index in range(2):
        pool.lose(index, "it did not answer", 0)  # and its process does not end
    with ThreadPoolExecutor() as threads:
        assert threads.submit(pool.wait_until_ready, 600, lambda: True).result(60) == frozenset()
        waiting = threads.submit(pool.wait_until_ready, 600, lambda: False)
        host.may_end.set()
        pool.close()
        assert waiting.result(60) == frozenset()


def test_loss_is_reported_although_no_thread_can_be_started(host, monkeypatch):
    start, now = threading.Thread.start, [0.0]

    def refuse(thread):
        if thread.name == "lp-end":
            raise RuntimeError("can't start new thread")
        start(thread)

    pool = ReplicaPool(host, 1, FailureConfig(restarts=1), lambda: now[0])
    host.may_end.set()
    host.said.put((0, ModelLoaded()))
    pool.start(60)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.lose(0, "it did not answer", 0)
    assert (
        pool.wait_until_ready(600, lambda: False) == frozenset() and pool.why_lost() == "replica 0: it did not answer"
    )
    monkeypatch.undo()
    now[0] = replica_pool.RETRY_SECONDS
    wait_until(lambda: host.started == [0, 0])
    pool.close()


def test_restarts_are_restored_after_an_hour(host):
    now = [0.0]
    pool = ReplicaPool(host, 1, FailureConfig(restarts=2), lambda: now[0])
    host.may_end.set()
    host.said.put((0, ModelLoaded()))
    pool.start(60)
    num_started = []
    for incarnation, now[0] in enumerate([0.0, 1800.0, 3601.0, 3602.0]):
        pool.lose(0, "it did not answer", incarnation)
        num_started.append(pool.num_loading)
    assert num_started == [1, 1, 1, 0]
    now[0] = 5401.0
    wait_until(lambda: pool.num_loading == 1)  # the replica that was given up
    pool.close()


def test_restarted_replica_that_never_becomes_ready_is_lost_again(host):
    now = [0.0]
    pool = ReplicaPool(host, 1, FailureConfig(restarts=2), lambda: now[0])
    host.said.put((0, ModelLoaded()))
    pool.start(60)
    pool.lose(0, "it did not answer", 0)
    now[0] = 100.0  # the time in which a lost process ends does not count
    host.may_end.set()
    wait_until(lambda: len(host.started) == 2)
    assert pool.num_loading == 1 and pool.incarnation(0) == 1
    now[0] = 161.0
    wait_until(lambda: pool.incarnation(0) == 2)
    assert pool.why_lost() == "replica 0: not ready within launcher.start_timeout=60 seconds"
    wait_until(lambda: len(host.started) == 3)
    host.said.put((0, ModelLoaded()))
    wait_until(lambda: pool.ready == {0})
    now[0] += 61.0
    assert pool.ready == {0} and pool.num_restarts == {0: 2}
    pool.close()


def test_closing_pool_starts_no_process(host, pool):
    pool.lose(0, "it did not answer", 0)
    closing = threading.Thread(target=pool.close)
    closing.start()
    wait_until(lambda: pool.is_closed)
    host.may_end.set()
    closing.join()
    assert host.started == [0, 1] and host.is_closed


def test_loss_reported_twice_counts_once(host, pool):
    for _ in range(2):
        pool.lose(1, "it did not answer", 0)
    host.may_end.set()
    wait_until(lambda: len(host.started) == 3)
    assert pool.num_restarts == {0: 0, 1: 1} and pool.incarnation(1) == 1


def test_restart_that_fails_is_tried_again(host, monkeypatch):
    """Memory or file descriptors are short for a moment. Each attempt counts as a restart."""
    monkeypatch.setattr(replica_pool, "RETRY_SECONDS", 0.01)
    pool = ReplicaPool(host, 1, FailureConfig(restarts=3))
    host.may_end.set()
    host.said.put((0, ModelLoaded()))
    pool.start(60)
    host.num_refused = 2
    pool.lose(0, "it did not answer", 0)
    wait_until(lambda: host.started == [0, 0])
    assert pool.num_restarts == {0: 3} and pool.num_loading == 1
    host.said.put((0, ModelLoaded()))  # counts as the old process's if `receive` was called before that was lost
    wait_until(host.said.empty)
    host.said.put((0, ModelLoaded()))
    wait_until(lambda: pool.ready == {0})
    pool.lose(0, "it did not answer", 1)
    assert pool.num_loading == 0  # no restarts are left
    pool.close()


def test_replica_that_failed_is_not_ready_by_an_older_message(host, pool):
    """A shard fails as the other shards' replica reports that it is loaded."""
    host.together.put([(0, Failed("a shard ended", None)), (0, ModelLoaded())])
    wait_until(lambda: pool.incarnation(0) == 1)
    host.said.put((1, Failed("its process ended", None)))
    wait_until(lambda: pool.incarnation(1) == 1)  # the messages before have been handled
    assert not pool.ready and pool.num_loading == 2
