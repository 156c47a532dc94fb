"""Silence for warnings of libraries while they are called."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType


class SharedContext:
    """A context of the whole process that several threads may be in at once.

    What it changes is changed by the first thread that enters and undone by the last one that leaves. Were each thread
    to save and restore for itself, one of them would save what another has changed, and restore that at the end.

    Args:
        make: returns a new context manager that makes the change.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]):
        self._make = make
        self._lock = threading.Lock()
        self._num_inside = 0
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        """Make the change unless another thread has made it."""
        with self._lock:
            if self._num_inside == 0:
                self._context = self._make()
                self._context.__enter__()
            self._num_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Undo the change if no other thread is inside."""
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


# Suppresses Python's warnings, and log records up to level WARNING, of the whole process.
WITHOUT_WARNINGS = SharedContext(_silence)
