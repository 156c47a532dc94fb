"""Start of replicas' processes on this machine. Imports nothing slow: commands start them before their own imports.

These are plain child processes and pipes: unlike multiprocessing's spawn, they do not import the caller's main module,
so a script needs no main guard. A child exits when its pipe closes or the driver has died, however that ended.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import LaunchError
from lp_runtime.utils.limits import MORE_PROCESSES, num_cores
from lp_runtime.utils.startup import python_command


class StartedProcess(NamedTuple):
    """A process that imports what a replica needs, then waits at the other end of the pipe for its settings."""

    process: subprocess.Popen
    pipe: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


_waiting: list[StartedProcess] = []  # started ahead, the first one last; they belong to no launcher yet


def start_process(pipe: Connection) -> subprocess.Popen:
    command = python_command("lp_runtime.launchers.worker.replica_process", str(pipe.fileno()))
    # A new session: Ctrl-C reaches only the driver, which then stops the replicas.
    return subprocess.Popen(command, pass_fds=[pipe.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)


def next_process() -> StartedProcess:
    """Return a process that was started ahead, or start one."""
    return _waiting.pop() if _waiting else _start()


def _start() -> StartedProcess:
    """Start a process; raise LaunchError if the system refuses."""
    try:
        ours, theirs = Pipe()
        with theirs:
            return StartedProcess(start_process(theirs), ours)
    except OSError as error:
        remedy = f"; {MORE_PROCESSES}" if error.errno == errno.EAGAIN else ""
        raise LaunchError(f"a replica's process cannot be started: {error.strerror}{remedy}") from error


@contextlib.contextmanager
def starting_ahead(config: RuntimeConfig) -> Iterator[None]:
    """Start the processes that a runtime with these settings is likely to need; kill those not used by the end."""
    try:
        wanted = config.num_gpus // config.num_stages
        if config.launcher.name in ("auto", "local") and (wanted > 1 or config.launcher.own_process):
            for _ in range(min(wanted, num_cores())):  # the number has not been checked yet
                _waiting.insert(0, _start())
        yield
    finally:
        kill_unused()


def kill_unused() -> None:
    """Kill the processes that no launcher has used."""
    while _waiting:
        _waiting.pop().kill()
