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


class ThreadFilter(logging.Filter):
    """Drops log records up to level WARNING of some threads.

    `logging.disable` would drop those of all threads, the program's own included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []  # identifiers, each as often as the thread is inside a block

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or threading.get_ident() not in self.threads


SILENT = ThreadFilter()


@contextmanager
def _filter_all() -> Iterator[None]:
    """Add SILENT to every handler, because only a record's own logger asks the filters of loggers."""
    loggers = [logging.root, *logging.root.manager.loggerDict.copy().values()]
    handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    handlers |= {logging.lastResort} if logging.lastResort else set()
    for handler in handlers:
        handler.addFilter(SILENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(SILENT)


SHARED_FILTERS = SharedContext(_filter_all)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress this thread's log records up to level WARNING, and the whole process's Python warnings."""
    with SHARED_FILTERS:
        SILENT.threads.append(threading.get_ident())
        try:
            yield
        finally:
            SILENT.threads.remove(threading.get_ident())
