"""Tests of a time limit for Python code."""

import threading
import time

import pytest

from lp_runtime.utils.time_limit import time_limit


def test_endless_loop_raises_timeout_error():
    with pytest.raises(TimeoutError), time_limit(0.01):
        while True:
            pass


def test_no_error_is_raised_after_the_block():
    """A block that ends at about its limit gets the error inside the block or not at all."""
    for number in range(300):
        try:
            with time_limit(0.0005):
                sum(range(100 * number))
        except TimeoutError:
            pass
        sum(range(1000))


def test_no_error_is_raised_while_the_timer_starts(monkeypatch):
    """An error inside `Timer.start` would come from threading, and leave its list of threads wrong."""
    start, started = threading.Timer.start, []

    def start_slowly(timer):
        start(timer)
        time.sleep(0.01)  # the limit has passed now, unless the machine is busy
        started.append(timer)

    monkeypatch.setattr(threading.Timer, "start", start_slowly)
    with pytest.raises(TimeoutError), time_limit(1e-6):
        while True:
            pass
    assert started
