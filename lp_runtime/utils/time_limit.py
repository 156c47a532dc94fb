"""Time limit for Python code that others wrote, such as a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this block once it has run for some seconds.

    Only Python code is interrupted: a C function that is running ends first.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_running = True

    def interrupt() -> None:
        with lock:
            if is_running:
                raise_in_thread(thread, ctypes.py_object(TimeoutError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    with lock:  # an error inside `start` would leave Python's list of threads wrong
        timer.start()
    try:
        yield
    finally:
        with lock:
            is_running = False
        # An error that was requested as the block ended is raised here, by the call of a Python function. It must not
        # be withdrawn with PyThreadState_SetAsyncExc(thread, NULL): CPython 3.11 then hangs under a profiler.
        timer.cancel()
