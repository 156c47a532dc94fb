"""Tests of a time limit for Python code."""

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
