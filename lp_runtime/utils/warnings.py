"""Suppression of Python warnings and log records while library code runs."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class SharedContext:
    """A process-wide context manager that several threads may be inside at once.

    The first thread that enters applies the change and the last one that leaves undoes it. If each thread saved and
    restored the state, one of them could save the changed state and restore that at the end.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]):
        self._make = make  # returns a new context manager that makes the change
        self._lock = threading.Lock()
        self._num_inside = 0
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._context = self._make()
                self._context.__enter__()
            self._num_inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and self._context is not None:
                context, self._context = self._context, None
                context.__exit__(None, None, None)


silent_threads: list[int] = []  # identifiers, each as often as the thread is inside a block


@contextmanager
def _drop_records() -> Iterator[None]:
    """Drop records up to level WARNING of the silent threads, and all Python warnings.

    `logging.disable` would drop those of all threads, the program's own included. Filters of handlers would miss
    handlers that a library adds inside the block.
    """
    call_handlers = logging.Logger.callHandlers

    def call_unless_silent(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING or threading.get_ident() not in silent_threads:
            call_handlers(logger, record)

    logging.Logger.callHandlers = call_unless_silent  # type: ignore[assignment, method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign]


SHARED_DROPPING = SharedContext(_drop_records)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress this thread's log records up to level WARNING, and the whole process's Python warnings."""
    with SHARED_DROPPING:
        silent_threads.append(threading.get_ident())
        try:
            yield
        finally:
            silent_threads.remove(threading.get_ident())
