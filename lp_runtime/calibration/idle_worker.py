"""Background work on the model, done in slices while no request uses it.

The worker thread ends whenever the model is in use, because even an idle thread slows it down. With OpenMP each
computing thread has its own team of threads. While the teams have more threads than there are cores, all teams sleep
when they wait, and a request's passes take a third longer.
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
    """Runs a piece of work slice by slice while the model is idle.

    `work` does one slice and returns whether there is more to do. After False, it is called again once the model has
    been in use. An exception ends the work for good.
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
        """Start working, with `after_use` once the model has been used; the interpreter's exit stops it."""
        atexit.register(self.stop)
        with self._lock:
            self._is_over, self._has_work = False, not after_use
            self._begin_if_idle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reserve the model for the `with` block: wait for the running slice, and start no other."""
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
        """End the work after the running slice."""
        atexit.unregister(self.stop)
        with self._lock:
            self._is_over = True
        self._join()

    def _begin_if_idle(self) -> None:
        """Start a thread if there is work and the model is idle; the caller holds the lock."""
        if self._may_work() and self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _may_work(self) -> bool:
        return self._has_work and not self._is_over and self._num_users == 0

    def _join(self) -> None:
        """Wait until the thread, if any, has ended."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # the setting is per thread; by default a thread uses all cores
        while self._goes_on():
            try:
                self._has_work = self._work()
            except Exception as error:  # background work must not end a process that serves requests
                log.warning("%s: ended early: %s", self._name, first_line(error))
                self._is_over = True

    def _goes_on(self) -> bool:
        """Return whether the thread may run another slice; if not, a later thread replaces it."""
        with self._lock:
            if not self._may_work():
                self._thread = None
            return self._thread is not None
