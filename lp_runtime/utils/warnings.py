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


@contextmanager
def _silence() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# Suppresses Python warnings and log records up to level WARNING in the whole process.
WITHOUT_WARNINGS = SharedContext(_silence)
