"""Replicas as processes of this machine, one a GPU, each run by launchers/replica_process.py.

Plain child processes and pipes: unlike multiprocessing's spawn, they do not import the caller's main module, so a
script needs no main guard. A child ends by itself when its pipe closes, however the driver died.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler

import torch

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.process_group import address_of, host_store
from lp_runtime.errors import ConfigError
from lp_runtime.launchers.messages import Failed
from lp_runtime.launchers.team import Place, TeamLauncher

HOST = "127.0.0.1"
GRACE = 0.5  # seconds that a process may take to end after its pipe has closed
EXIT_TIMEOUT = 5.0  # seconds that a replica may take to end by itself


class _Line:
    """Our end of the pipe to a replica. What it is told waits in a queue: one that hangs keeps nobody waiting."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="lp-line", daemon=True)
        self._sender.start()

    def say(self, message: object) -> None:
        """Never waits; fails only if the message cannot be pickled."""
        self._said.put(bytes(ForkingPickler.dumps(message)))

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # that it has ended shows when it is listened to
            for data in iter(self._said.get, None):
                self.pipe.send_bytes(data)

    def close(self, timeout: float | None = None) -> None:
        """Close the pipe, once all has been said; if that has not ended in time, leave it."""
        self._said.put(None)
        self._sender.join(timeout)
        if not self._sender.is_alive():
            self.pipe.close()


def start_process(pipe: Connection) -> subprocess.Popen:
    """Start a replica that listens at an end of a pipe."""
    command = [sys.executable, "-m", "lp_runtime.launchers.replica_process", str(pipe.fileno())]
    # A session of its own: Ctrl-C reaches the driver alone, which then ends the replicas.
    return subprocess.Popen(command, pass_fds=[pipe.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)


class SpawnedLauncher(TeamLauncher):
    """launcher=local with several replicas, or one that is to be apart."""

    def __init__(self, config: RuntimeConfig):
        self.num_replicas = config.gpus or 1
        self._processes: dict[int, subprocess.Popen] = {}
        self._lines: dict[int, _Line] = {}
        self._unheard: list[_Line] = []  # to replicas that have ended
        if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
            available = torch.cuda.device_count()
            if self.num_replicas > available and not (available and config.launcher.backend == "gloo"):
                raise ConfigError(f"gpus={self.num_replicas}: this machine has {available} (on CPUs: device=cpu)")
        # The driver hosts the store: it outlives every replica.
        launcher = config.launcher
        self._host = HOST if launcher.interface is None else address_of(launcher.interface)
        self._store = host_store(self._host, launcher.port, launcher.start_timeout)
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def _launch(self, index: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._processes[index] = start_process(theirs)
        line = self._lines[index] = _Line(ours)
        line.say((self._config, *vars(self._place(index)).values()))

    def _place(self, index: int) -> Place:
        return Place(index, self.num_replicas)

    def _meeting_place(self, leader: int) -> tuple[str, int]:
        return self._host, self._store.port

    def _send(self, index: int, message: object) -> None:
        line = self._lines.get(index)
        if line is not None:
            line.say(message)

    def _receive(self, timeout: float) -> list[tuple[int, object]]:
        indices = {line.pipe: (index, line) for index, line in list(self._lines.items())}
        if not indices:
            time.sleep(timeout)
        messages = []
        for pipe in wait(list(indices), timeout):
            index, line = indices[pipe]
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = self._death(index, line)
            if message is not None and (self._lines.get(index) is line or isinstance(message, Failed)):
                messages.append((index, message))
        while self._unheard:  # here, where nobody waits for them
            self._unheard.pop().close()
        return messages

    def _death(self, index: int, line: _Line) -> Failed | None:
        """A pipe is closed: what became of its process, if that was not killed from here."""
        if self._lines.get(index) is not line:
            return None
        self._unheard.append(self._lines.pop(index))
        process = self._processes[index]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        code = process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return Failed(f"its process ended ({how})", None)

    def _kill(self, index: int) -> None:
        line = self._lines.pop(index, None)
        process = self._processes.get(index)
        if process is not None:
            process.kill()
            process.wait()
        if line is not None:
            self._unheard.append(line)

    def _end(self) -> None:
        lines = [*self._lines.values(), *self._unheard]
        for line in lines:
            line.close(timeout=GRACE)
        deadline = time.monotonic() + EXIT_TIMEOUT
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for line in lines:
            line.close()
        self._lines, self._processes = {}, {}
