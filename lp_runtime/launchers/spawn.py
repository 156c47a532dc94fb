"""Launcher of replicas as child processes, one per shard, run by worker/replica_process.py; see process_start.py."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.devices import device_type
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.process_group import GroupOptions, new_segment_name
from lp_runtime.distributed.shards import ShardPlace, clear_up
from lp_runtime.distributed.store import address_of, host_store
from lp_runtime.errors import ConfigError, first_line
from lp_runtime.launchers.team import TeamLauncher
from lp_runtime.launchers.wire.messages import Failed, encode_order
from lp_runtime.launchers.worker.process_host import Placement, ProcessHost
from lp_runtime.replica.process_start import next_process

LOOPBACK = "127.0.0.1"
MAX_MEETINGS = 100  # latest groups whose files are removed at close, if members were killed while they joined
CLOSE_GRACE_SECONDS = 0.5  # for a process to exit after it closed its pipe, or for queued messages to be sent at close
EXIT_TIMEOUT_SECONDS = 5.0  # for all replicas to exit by themselves
KILL_TIMEOUT_SECONDS = 30.0  # for a killed process to exit: the NVIDIA driver frees its GPU memory first


class ReplicaPipe:
    """The driver's end of the pipe to a replica. A thread sends, so a hanging replica never blocks `send`."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe  # to receive from
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="lp-pipe", daemon=True)
        self._sender.start()

    def send(self, data: bytes) -> None:
        self._queue.put(data)

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):  # the replica has ended, which `receive` reports
            for data in iter(self._queue.get, None):
                self.pipe.send_bytes(data)

    def close(self, timeout: float | None = None) -> None:
        """Close the pipe once all messages are sent; leave it open if that takes more than `timeout` seconds."""
        self._queue.put(None)
        self._sender.join(timeout)
        if not self._sender.is_alive() and not self.pipe.closed:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)  # also ends the copies of this end in forked processes
            self.pipe.close()


class SpawnHost(ProcessHost):
    """Replicas as child processes."""

    def __init__(self, config: RuntimeConfig):
        self.processes: dict[int, subprocess.Popen] = {}  # the latest ones, by number
        self.num_shards = config.num_shards
        self._config = config
        self._num_stages = config.num_stages
        self._num_processes = config.num_replicas * config.num_shards
        self._pipes: dict[int, ReplicaPipe] = {}
        self._segments: dict[int, str] = {}  # name of the shared memory of each replica's shards, by replica index
        self._meetings: deque[str] = deque(maxlen=MAX_MEETINGS)  # shared memory of the latest groups
        self._ended_pipes: list[ReplicaPipe] = []  # of replicas that have ended; closed by the receiving thread
        if device_type(config.device) == "cuda":
            available = torch.cuda.device_count()
            may_share = config.launcher.backend in ("gloo", "shared") and config.num_stages == 1
            if config.num_gpus > available and not (available and may_share):
                raise ConfigError(f"gpus={config.num_gpus}: this machine has {available} (on CPUs: device=cpu)")
        launcher = config.launcher
        self._address = LOOPBACK if launcher.interface is None else address_of(launcher.interface)
        self._options = GroupOptions(launcher.timeout, backend=launcher.backend, interface=launcher.interface)
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]  # torch does not re-export it
        self._hosting = threading.Lock()  # held while `_store` is set
        if config.num_replicas > 1 and not self._options.shares_memory(config.num_replicas):
            self._host_store()

    def start_process(self, index: int) -> None:
        segment = self._segments[index] = new_segment_name()
        for number in self.numbers(index):
            self.processes[number], ours = next_process()
            pipe = self._pipes[number] = ReplicaPipe(ours)
            shard = ShardPlace(number % self.num_shards, self.num_shards, segment, self._config.failure.timeout)
            place = Placement(number * self._num_stages, self._num_processes, shard=shard)
            pipe.send(pickle.dumps((self._config, place)))

    def rendezvous(self, members: Sequence[int]) -> ReplicaContext:
        if self._options.shares_memory(len(members)):  # asked for each group: the folder's file system may be full
            segment = new_segment_name()
            self._meetings.append(segment)
            return ReplicaContext(segment=segment)
        return ReplicaContext(host=self._address, port=self._host_store())

    def _host_store(self) -> int:
        """Host the store in which replicas meet, unless that was done before; return its port."""
        with self._hosting:
            if self._store is None:  # hosted by the driver, which outlives every replica
                launcher = self._config.launcher
                self._store = host_store(self._address, launcher.port, launcher.start_timeout)
            return self._store.port

    def send(self, index: int, message: object) -> None:
        pipe = self._pipes.get(self.numbers(index)[0])
        if pipe is not None:
            pipe.send(encode_order(message))

    def receive(self, timeout: float) -> list[tuple[int, object]]:
        replicas = {pipe.pipe: (number, pipe) for number, pipe in list(self._pipes.items())}
        messages = []
        for connection in wait(list(replicas), timeout):
            assert isinstance(connection, Connection)
            number, pipe = replicas[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = self._death(number, pipe)
            except Exception as error:  # the others' messages, read already, must not be lost
                message = Failed(f"its message cannot be read: {first_line(error)}")
            if message is not None and (self._pipes.get(number) is pipe or isinstance(message, Failed)):
                messages.append((number // self.num_shards, message))
        while self._ended_pipes:  # closed here because `close` may block, and `kill` must not
            self._ended_pipes.pop().close()
        return messages

    def _death(self, number: int, pipe: ReplicaPipe) -> Failed | None:
        """Return the Failed message for a process whose pipe has closed; None if `kill` ended it."""
        if self._pipes.get(number) is not pipe or self._pipes.pop(number, None) is None:  # another thread may `kill`
            return None
        self._ended_pipes.append(pipe)
        process = self.processes[number]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_GRACE_SECONDS)
        code = process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        whose = "its process" if self.num_shards == 1 else f"the process of its shard {number % self.num_shards}"
        return Failed(f"{whose} ended ({how})")

    def kill(self, index: int) -> Callable[[], None]:
        numbers = self.numbers(index)
        processes = [self.processes[number] for number in numbers if number in self.processes]
        for process in processes:
            process.kill()
        self._ended_pipes += [self._pipes.pop(number) for number in numbers if number in self._pipes]

        def wait_for_end() -> None:
            _wait_for_all(processes, KILL_TIMEOUT_SECONDS)
            clear_up(self._segments[index])

        return wait_for_end

    def close(self) -> None:
        self._store = None  # its server ends, and the port is free again
        pipes = [*self._pipes.values(), *self._ended_pipes]
        try:
            for pipe in pipes:
                pipe.close(CLOSE_GRACE_SECONDS)
            _wait_for_all(self.processes.values(), EXIT_TIMEOUT_SECONDS)
        finally:  # also if the wait is interrupted (KeyboardInterrupt)
            for process in self.processes.values():
                process.kill()
        _wait_for_all(self.processes.values(), KILL_TIMEOUT_SECONDS)
        for pipe in pipes:
            pipe.close(CLOSE_GRACE_SECONDS)
        for segment in (*self._segments.values(), *self._meetings):
            clear_up(segment)
        self._pipes, self.processes = {}, {}


def _wait_for_all(processes: Iterable[subprocess.Popen], timeout: float) -> None:
    """Wait up to `timeout` seconds until all processes have ended."""
    deadline = time.monotonic() + timeout
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


class SpawnLauncher(TeamLauncher):
    """launcher=local with several replicas or shards, or with launcher.own_process=true."""

    def __init__(self, config: RuntimeConfig):
        self.host = SpawnHost(config)
        super().__init__(config, self.host)

    @property
    def process_ids(self) -> dict[int, int]:
        num_shards = self.host.num_shards
        processes = sorted(self.host.processes.items())
        return {number // num_shards: each.pid for number, each in processes if number % num_shards == 0}
