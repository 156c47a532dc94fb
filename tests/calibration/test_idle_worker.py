"""Work between the times when the model is in use."""

from __future__ import annotations

import threading

import pytest

from lp_runtime.calibration.idle_worker import IdleWorker

PATIENCE = 60.0  # seconds; a failure's only


def is_there(name: str) -> bool:
    return name in [thread.name for thread in threading.enumerate()]


class Slices:
    """Work whose slices a test lets go one by one."""

    def __init__(self, num: int):
        self.num_left = num
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.num_done = 0

    def work(self) -> bool:
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE)
        self.num_left -= 1
        self.num_done += 1
        return self.num_left > 0

    def await_slice(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE)


def test_a_slice_that_has_begun_is_waited_for_and_no_other_begins():
    slices = Slices(3)
    worker = IdleWorker(slices.work, "test")
    worker.start()
    slices.await_slice()
    entered = threading.Event()

    def use() -> None:
        with worker.paused():
            assert slices.num_done == 1
            assert not is_there("test")  # a waiting thread would slow down those that compute
            entered.set()
            assert not slices.begun.acquire(blocking=False)

    user = threading.Thread(target=use)
    user.start()
    assert not entered.is_set()  # while the slice goes on
    slices.may_end.release()
    user.join(PATIENCE)
    assert entered.is_set()
    slices.await_slice()  # the next one, now that nobody uses the model
    assert is_there("test")
    slices.may_end.release(2)
    worker.stop()
    assert 2 <= slices.num_done <= 3


def test_when_nothing_is_left_the_next_slice_waits_for_a_use():
    slices = Slices(1)
    worker = IdleWorker(slices.work, "test")
    worker.start()
    slices.may_end.release()
    slices.await_slice()
    with worker.paused():
        assert slices.num_done == 1
        assert not slices.begun.acquire(blocking=False)
    slices.may_end.release()
    slices.await_slice()
    worker.stop()
    assert slices.num_done == 2


def test_the_first_slice_may_wait_for_a_use():
    slices = Slices(1)
    slices.may_end.release()
    worker = IdleWorker(slices.work, "test")
    worker.start(after_use=True)
    with worker.paused(), worker.paused():
        assert slices.num_done == 0
    slices.await_slice()
    worker.stop()
    assert slices.num_done == 1


def test_a_failure_ends_the_work_and_nothing_else(caplog):
    failed = threading.Event()

    def fail() -> bool:
        failed.set()
        raise ValueError("no memory")

    worker = IdleWorker(fail, "the test's work")
    worker.start()
    assert failed.wait(PATIENCE)
    with worker.paused():
        pass
    worker.stop()
    assert "the test's work: ended early: no memory" in caplog.text


@pytest.mark.parametrize("is_used", [False, True])
def test_it_can_be_stopped_at_any_time(is_used):
    worker = IdleWorker(lambda: True, "test")
    worker.start()
    if is_used:
        with worker.paused():
            worker.stop()
    worker.stop()
