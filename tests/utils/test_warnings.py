"""Tests of silencing warnings from several threads at once."""

import io
import logging
import threading
import warnings

from lp_runtime.utils.warnings import without_warnings


def test_overlapping_threads(caplog):
    """The first thread to enter leaves first.

    It must not end the other thread's silence, and the other must not make the silence permanent. Records of a thread
    outside are never lost, nor are errors.
    """
    filters = list(warnings.filters)
    second_is_in, first_has_left = threading.Event(), threading.Event()

    def second():
        with without_warnings():
            second_is_in.set()
            assert first_has_left.wait(60)
            logging.warning("silent in second")
            logging.error("error in second")

    with without_warnings():
        thread = threading.Thread(target=second)
        thread.start()
        assert second_is_in.wait(60)
        with without_warnings():
            pass
        logging.getLogger("transformers").warning("silent in first")
        logging.warning("silent in first")
        outside = threading.Thread(target=logging.warning, args=["of a thread outside"])
        outside.start()
        outside.join()
    logging.warning("after the first")
    first_has_left.set()
    thread.join()
    logging.warning("after both")
    assert caplog.messages == ["of a thread outside", "after the first", "error in second", "after both"]
    assert warnings.filters == filters


def test_handler_added_inside_is_silent():
    """`logging.warning` adds one to a root logger that has none, as in most programs."""
    root, text = logging.Logger("root"), io.StringIO()
    with without_warnings():
        root.addHandler(logging.StreamHandler(text))
        root.warning("inside")
    root.warning("after")
    assert text.getvalue() == "after\n"


def test_error_inside_restores_warnings(caplog):
    """The error is passed on."""
    filters = list(warnings.filters)
    try:
        with without_warnings():
            raise KeyError("inside")
    except KeyError:
        logging.warning("after the error")
    else:
        raise AssertionError("the error was kept back")
    assert caplog.messages == ["after the error"] and warnings.filters == filters
