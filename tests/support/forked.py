"""Replicas and ranks, forked from a process that has imported everything, which saves seconds a start.

The workers of pytest-xdist share the process that the controller of the run has started. Processes of the command line
start their replicas as for users.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

REPLICA, COMPILER = "replica", "compiler"
COMMAND_TIMEOUT = 300.0  # seconds before a command is given up; not a performance bound
_lock = threading.Lock()  # only the first reader of a process's exit status gets it


class _ServerOfController(multiprocessing.forkserver.ForkServer):
    """Client of the fork server that the controller of this run starts and ends."""

    def __init__(self, address: str, key: bytes | None):
        super().__init__()
        self._forkserver_address = address
        self._forkserver_authkey = key
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # unused, but the protocol sends one

    def ensure_running(self) -> None:
        multiprocessing.resource_tracker.ensure_running()


def server_of_controller() -> tuple[str, bytes | None]:
    """Start the run's fork server, in the controller; return the arguments of `join_server`."""
    forking()
    server = multiprocessing.forkserver._forkserver
    return server._forkserver_address, getattr(server, "_forkserver_authkey", None)  # a key since Python 3.14


def join_server(address: str, key: bytes | None) -> None:
    """Make this process fork from the controller's server from now on."""
    server = _ServerOfController(address, key)
    multiprocessing.forkserver.ensure_running = server.ensure_running
    multiprocessing.forkserver.connect_to_new_process = server.connect_to_new_process


def wait_for_server() -> None:
    """Wait until processes can be forked: the server has imported everything and compiled Numba's code."""
    process = forking().Process(target=int)
    process.start()
    process.join()


@functools.cache
def forking() -> BaseContext:
    """Return a context that forks from a process that imported template.py, in the present environment."""
    actual = multiprocessing.get_context("forkserver")
    actual.set_forkserver_preload(["support.template"])
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not pass sys.path to that process
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return actual


class ForkedReplica:
    """A forked replica with the part of subprocess.Popen that a launcher uses."""

    def __init__(self, pipe: Connection):
        arguments = (pipe, os.sched_getaffinity(0))
        with _lock:
            self._process = forking().Process(target=_be_replica, args=arguments, name=REPLICA, daemon=True)
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        with _lock:
            return self._process.exitcode

    def kill(self) -> None:
        with _lock:
            self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.returncode) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(REPLICA, timeout)
            time.sleep(0.005)
        return code


def _be_replica(pipe: Connection, cores: set[int]) -> None:
    from lp_runtime.launchers.worker.replica_process import be_replica

    os.setsid()
    os.sched_setaffinity(0, cores)
    be_replica(pipe)


def run_forked(
    main: Callable[..., object], *arguments, cwd: Path, environment: dict[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess:
    """Run a command's function in a forked process; return what `subprocess.run` would return.

    Modules are not imported again, so they keep the environment variables that they read at import. Replicas of the
    command are forked, too.

    Args:
        main: a function of a module, which can be pickled.
        arguments: of the function.
        cwd: of the process.
        environment: of the process; None for this process's.
        text: the process's stdin.
    """
    with start_forked(main, *arguments, cwd=cwd, environment=environment, text=text) as wait:
        return wait()


@contextlib.contextmanager
def start_forked(
    main: Callable[..., object], *arguments, cwd: Path, environment: dict[str, str] | None = None, text: str = ""
) -> Iterator[Callable[[], subprocess.CompletedProcess]]:
    """Start what `run_forked` runs; yield a function that waits for its end. Leaving the context kills it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(text)
        place = (files, str(cwd), dict(os.environ if environment is None else environment))
        process = forking().Process(target=_be_command, args=(main, arguments, *place))
        process.start()

        def wait() -> subprocess.CompletedProcess:
            process.join(COMMAND_TIMEOUT)
            out, err = (file.read_text() for file in files[1:])
            return subprocess.CompletedProcess(arguments, process.exitcode, out, err)

        try:
            yield wait
        finally:
            process.kill()
            process.join()


def _be_command(main: Callable, arguments: tuple, files: Sequence[Path], cwd: str, environment: dict[str, str]) -> None:
    import torch

    from lp_runtime.replica import process_start

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, (file, mode) in enumerate(zip(files, "rww", strict=True)):
        with open(file, mode) as opened:
            os.dup2(opened.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    process_start.start_process = ForkedReplica
    # A fork loses torch's thread pool. The first call makes a new one, and fails if two threads make it at once.
    torch.set_num_threads(torch.get_num_threads())
    try:
        main(*arguments)
    finally:
        sys.stdout.flush()


def next_result(results, processes: Sequence[BaseProcess]):
    """Return the next item that processes put into a queue; wait as long as one of them is alive."""
    while True:
        were_alive = any(process.is_alive() for process in processes)
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1.0)
        assert were_alive, f"all processes have ended: {[process.exitcode for process in processes]}"


class ForkedCompiler:
    """A forked compiler with the part of subprocess.Popen that a ConstraintCompiler uses."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **options: object):
        pipe = Connection(os.dup(pass_fds[0]))
        with _lock, pipe:
            self._process = forking().Process(target=_be_compiler, args=(pipe,), name=COMPILER, daemon=True)
            self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _be_compiler(pipe: Connection) -> None:
    from lp_runtime.constraints.compile_process import serve

    os.setsid()
    serve(pipe)


def living_processes(name: str = REPLICA) -> list[int]:
    """Return the process ids of living forked processes with a name."""
    with _lock:
        return [process.pid for process in multiprocessing.active_children() if process.name == name]
