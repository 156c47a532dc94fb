"""Tests of silencing warnings in the whole process, from several threads at once."""

import logging
import threading
import warnings

from lp_runtime.utils.warnings import WITHOUT_WARNINGS


def test_overlapping_threads_restore_warnings():
    """The first thread to enter leaves first.

    It must not end the other thread's silence, and the other must not make the silence permanent.
    """
    disabled, filters = logging.root.manager.disable, list(warnings.filters)
    second_is_in, first_has_left = threading.Event(), threading.Event()
    seen = []

    def second():
        with WITHOUT_WARNINGS:
            second_is_in.set()
            assert first_has_left.wait(60)
            seen.append(logging.root.manager.disable)

    with WITHOUT_WARNINGS:
        thread = threading.Thread(target=second)
        thread.start()
        assert second_is_in.wait(60)
    first_has_left.set()
    thread.join()
    assert seen == [logging.WARNING]
    assert logging.root.manager.disable == disabled and warnings.filters == filters


def test_error_inside_restores_warnings():
    """The error is passed on."""
    disabled = logging.root.manager.disable
    try:
        with WITHOUT_WARNINGS:
            raise KeyError("inside")
    except KeyError:
        pass
    else:
        raise AssertionError("the error was kept back")
    assert logging.root.manager.disable == disabled
