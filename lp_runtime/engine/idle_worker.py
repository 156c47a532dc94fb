"""A thread that works in slices while nobody else needs the model."""

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
        self._work = work
        self._changed = threading.Condition()
        self._num_users = 0
        self._is_working = self._is_stopped = False
        self._may_work = True
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, after_use: bool = False) -> None:
        """Begin to work; `stop` ends it, at the interpreter's exit if nobody calls it before.

        Args:
            after_use: whether the first slice waits until the model has been in use.
        """
        self._may_work = not after_use
        atexit.register(self.stop)
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Use the model in the `with` block: a slice that has begun is waited for, and no other begins."""
        with self._changed:
            self._num_users += 1
            self._changed.wait_for(lambda: not self._is_working)
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._may_work = True
                self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, after the slice that has begun."""
        atexit.unregister(self.stop)
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # else a new thread computes with all cores
        while self._wait():
            try:
                may_go_on = self._work()
            except Exception as error:  # what is done when nobody waits for it must not end what others wait for
                log.warning("%s: ended early: %s", self._thread.name, first_line(error))
                self._end_slice(False)
                return
            self._end_slice(may_go_on)

    def _wait(self) -> bool:
        """Wait until a slice may begin, and begin it; return False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or (self._may_work and self._num_users == 0))
            self._is_working = not self._is_stopped
            return self._is_working

    def _end_slice(self, may_go_on: bool) -> None:
        with self._changed:
            self._is_working, self._may_work = False, may_go_on
            self._changed.notify_all()
