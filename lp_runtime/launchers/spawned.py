"""Replicas as processes of this machine, one a GPU, each run by launchers/worker_process.py.

Plain child processes and pipes: unlike multiprocessing's spawn, they do not import the caller's main module, so a
script needs no main guard. A child ends by itself when its pipe closes, however the driver died.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Generator
from multiprocessing.connection import Connection, Pipe, wait

import torch

from lp_runtime.config import RuntimeConfig
from lp_runtime.decoding import Event, Report, Request
from lp_runtime.errors import ConfigError, LaunchError, ReplicaError
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.messages import Failed, Finished, Ready, first_cause
from lp_runtime.parallel.group import ReplicaContext, host_store

HOST = "127.0.0.1"
GRACE = 0.5  # seconds in which a failure's cause may arrive after its consequence
EXIT_TIMEOUT = 5.0  # seconds that a replica may take to end by itself


class SpawnedLauncher(Launcher):
    """launcher=local with several replicas."""

    def __init__(self, config: RuntimeConfig):
        self.num_replicas = config.gpus
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
            available = torch.cuda.device_count()
            if self.num_replicas > available and not (available and config.launcher.backend == "gloo"):
                raise ConfigError(f"gpus={self.num_replicas}: this machine has {available} (on CPUs: device=cpu)")
        # The driver hosts the store, so that its port is known before any replica starts.
        self._store = host_store(HOST, config.launcher.port, config.launcher.start_timeout)
        try:
            for rank in range(self.num_replicas):
                self._spawn(config, rank)
            self.info = self._await_ready(config.launcher.start_timeout)
        except BaseException:
            self.close()
            raise

    def _spawn(self, config: RuntimeConfig, rank: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "lp_runtime.launchers.worker_process", str(theirs.fileno())]
            # A session of its own: Ctrl-C reaches the driver alone, which then ends the replicas.
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
            )
        self._pipes.append(ours)
        size = self.num_replicas
        self._send(ours, (config, ReplicaContext(rank, size, rank, size, HOST, self._store.port)))

    def _await_ready(self, timeout: float):
        deadline = time.monotonic() + timeout
        waiting = set(range(self.num_replicas))
        info = None
        while waiting:
            for rank, message in self._receive(deadline):
                if message is None or isinstance(message, Failed):
                    raise self._failure(rank, message, "at start")
                info = message.info if isinstance(message, Ready) else info
                waiting.discard(rank)
            if waiting and time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {min(waiting)} was not ready within launcher.start_timeout={timeout:g} seconds"
                )
        return info

    def _run(self, request: Request) -> Generator[Event, None, None]:
        for pipe in self._pipes:
            self._send(pipe, request)
        waiting = set(range(self.num_replicas))
        try:
            while waiting:
                yield from self._take(waiting, "while decoding")
        except GeneratorExit:  # the caller stopped early
            if self._pipes:  # and did not close the launcher first
                self._send(self._pipes[0], "cancel")
                while waiting:
                    self._take(waiting, "while cancelling")
            raise

    def _take(self, waiting: set[int], when: str) -> list[Event]:
        """Wait for messages and take all there are: rank 0's events; ranks that have finished leave `waiting`."""
        events = []
        for rank, message in self._receive(None):
            if message is None or isinstance(message, Failed):
                raise self._failure(rank, message, when)
            if isinstance(message, Finished | Report):
                waiting.discard(rank)
            if not isinstance(message, Finished):
                events.append(message)
        return events

    def _receive(self, deadline: float | None) -> list[tuple[int, object]]:
        """(rank, message) of every pipe that has one; the message is None where the pipe is closed."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        messages = []
        for pipe in wait(self._pipes, timeout):
            rank = self._pipes.index(pipe)
            try:
                messages.append((rank, pipe.recv()))
            except (EOFError, ConnectionError):
                messages.append((rank, None))
        return messages

    def _failure(self, rank: int, message: Failed | None, when: str) -> Exception:
        """The error to raise for a failed rank: of all that fail within GRACE, the one that explains the rest."""
        failures = [message or self._death(rank)]
        deadline = time.monotonic() + GRACE
        seen = {rank}
        while len(seen) < self.num_replicas and time.monotonic() < deadline:
            pipes = [pipe for other, pipe in enumerate(self._pipes) if other not in seen]
            for pipe in wait(pipes, max(0.0, deadline - time.monotonic())):
                other = self._pipes.index(pipe)
                try:
                    late = pipe.recv()
                except (EOFError, ConnectionError):
                    late = self._death(other)
                if isinstance(late, Failed):
                    failures.append(late)
                    seen.add(other)
        cause = first_cause(failures)
        kind = cause.kind or (LaunchError if when == "at start" else ReplicaError)
        return kind(f"rank {cause.rank} failed {when}: {cause.message}")

    def _death(self, rank: int) -> Failed:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        code = process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return Failed(rank, f"its process ended ({how})", None)

    @staticmethod
    def _send(pipe: Connection, message: object) -> None:
        with contextlib.suppress(OSError):  # a dead replica shows when its pipe is read
            pipe.send(message)

    def _close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + EXIT_TIMEOUT
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes, self._processes = [], []
