"""Work that is done in slices while nobody else needs the model.

A thread does it that ends whenever the model is in use. With OpenMP each thread that computes has a team of threads of
its own, and while there are more threads in teams than cores, all teams wait asleep: the passes of a request would take
a third longer beside a thread that does nothing.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lp_runtime.errors import first_line

log = logging.getLogger(__name__)


class IdleWorker:
    """Does a piece of work slice by slice, between the times when the model is in use.

    Args:
        work: does one slice; returns whether there is more to do. After a slice that returns False, the next one is
            done when the model has been in use again. An exception ends the work.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], bool], name: str):
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._num_users = 0
        self._has_work = False
        self._is_over = True  # not started yet, stopped, or failed
        self._num_threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None

    def start(self, after_use: bool = False) -> None:
        """Begin to work; `stop` ends it, at the interpreter's exit if nobody calls it before.

        Args:
            after_use: whether the first slice waits until the model has been in use.
        """
        atexit.register(self.stop)
        with self._lock:
            self._is_over, self._has_work = False, not after_use
            self._begin_if_idle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Use the model in the `with` block: a slice that has begun is waited for, and no other begins."""
        with self._lock:
            self._num_users += 1
        self._join()
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                self._has_work = True
                self._begin_if_idle()

    def stop(self) -> None:
        """End the work, after the slice that has begun."""
        atexit.unregister(self.stop)
        with self._lock:
            self._is_over = True
        self._join()

    def _begin_if_idle(self) -> None:
        """Start a thread if there is something to do and nobody uses the model; called with the lock."""
        if self._may_work() and self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _may_work(self) -> bool:
        return self._has_work and not self._is_over and self._num_users == 0

    def _join(self) -> None:
        """Wait until no thread works."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # else a new thread computes with all cores
        while self._goes_on():
            try:
                self._has_work = self._work()
            except Exception as error:  # what is done when nobody waits for it must not end what others wait for
                log.warning("%s: ended early: %s", self._name, first_line(error))
                self._is_over = True

    def _goes_on(self) -> bool:
        """Whether the thread may begin another slice; if not, another thread may take its place."""
        with self._lock:
            if not self._may_work():
                self._thread = None
            return self._thread is not None
