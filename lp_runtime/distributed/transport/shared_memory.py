"""Transport between processes of one machine: rows in shared memory that all of them map.

Every replica has one line and two buffers that only it writes. It copies its integers into a buffer, then publishes the
round's number in its line; the others read the buffer when they see the number. Rounds alternate between the two
buffers. A replica publishes a round only after it has read the previous one, so no replica overwrites a buffer that
another still reads.

A replica can leave, detect a loss, or give up without the cooperation of others. A segment serves one group. Its file
exists only while the group forms, so no file remains, however the processes end.

Letters: R replicas, n integers that each sends.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch

from lp_runtime.distributed.transport.group import CPU, Transport
from lp_runtime.errors import LaunchError, PassFailedError, ReplicaError
from lp_runtime.utils.atomic import load_acquire, store_release
from lp_runtime.utils.jit import bound, compiled, compiles
from lp_runtime.utils.limits import num_cores

FOLDER = Path("/dev/shm")  # an in-memory file system on Linux
LINE_WORDS = 16  # 128 bytes, so that no two lines share a pair of cache lines, which CPUs prefetch together
BUFFER_WORDS = 2048  # 16 KiB; longer rows take several rounds
# Words of a line: number of the latest round, process id, namespace of that id, whether the replica has left.
ROUND, PROCESS, NAMESPACE, HAS_LEFT = range(4)
PID_NAMESPACE = Path("/proc/self/ns/pid")  # containers of a pod share memory, but number their processes separately
JOINED = 1  # number of the round in which a replica joins
SPINS = 200  # polls of the lines before the CPU is yielded; about 1 us
YIELD_SECONDS = 5e-4  # a wait yields the CPU between polls for this long, and sleeps between them later
# A patient wait yields for this long, or sleeps only briefly where cores are few: in a request, the next announcement
# comes within a step.
ALERT_SECONDS = 0.02
SHORT_SLEEP_SECONDS = 1e-5  # about 60 us with Linux's timer slack; leaves the core to busy peers, unlike yielding
MAX_SLEEP_SECONDS = 1e-3
SLEEP_FRACTION = 1 / 8  # length of a sleep, as a fraction of the time waited so far
CHECK_SECONDS = 0.02  # between checks whether the peer's process is alive
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def why_unavailable(num_replicas: int) -> str | None:
    """Return a short reason why R replicas of this machine cannot share memory; None if they can."""
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:  # has no name that another user could have taken
            _map(file.fileno(), num_replicas).close()
    except OSError as error:
        return f"{FOLDER}: {error.strerror or error}"
    return None


def _map(descriptor: int, num_replicas: int, buffer_words: int = BUFFER_WORDS) -> mmap.mmap:
    """Allocate and map a segment: a line and two buffers per replica."""
    size = 8 * num_replicas * (LINE_WORDS + 2 * (1 + buffer_words))
    os.posix_fallocate(descriptor, 0, size)  # raises if the file system is full; a write would kill the process
    return mmap.mmap(descriptor, size)


def _open_segment(path: Path, num_replicas: int, buffer_words: int) -> mmap.mmap:
    # The folder is open to all users of the machine: a link in it may lead to a file of the user who runs this.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        return _map(descriptor, num_replicas, buffer_words)
    finally:
        os.close(descriptor)


class SharedMemoryTransport(Transport):
    """Transport between processes of one machine. The constructor waits until all replicas have joined."""

    def __init__(
        self,
        name: str,  # of the segment; unique to this group
        rank: int,
        num_replicas: int,
        timeout: float,  # seconds within which all replicas must join, or LaunchError is raised
        step_timeout: float,  # seconds after which a peer that does not answer is an error
        is_abandoned: Callable[[], bool],  # called while peers are joining; true ends the wait
        buffer_words: int = BUFFER_WORDS,  # 64-bit integers that each replica can send in one round
    ):
        super().__init__("shared", CPU)
        compile_shared_memory()
        self._publish, self._first_late = _kernels()
        self._rank = rank
        self._step_timeout = step_timeout
        self._buffer_words = buffer_words
        self._is_aborted = False
        self._has_cores = num_cores() >= num_replicas  # enough for all replicas to poll at once
        path = FOLDER / name
        try:
            # The map is never closed explicitly: views may outlive the group. It is unmapped with the last view.
            words = np.frombuffer(_open_segment(path, num_replicas, buffer_words), dtype=np.int64)
            lines, buffers = np.split(words, [num_replicas * LINE_WORDS])
            self._lines = lines.reshape(num_replicas, LINE_WORDS)
            self._buffers = buffers.reshape(2, num_replicas, 1 + buffer_words)
            self._processes: dict[int, psutil.Process] = {}  # by rank, of the processes that are visible from here
            self._round = JOINED
            self._join(timeout, is_abandoned)
        except OSError as error:
            raise LaunchError(f"launcher.backend=shared: {FOLDER}: {error.strerror or error}") from error
        finally:
            path.unlink(missing_ok=True)

    def _join(self, timeout: float, is_abandoned: Callable[[], bool]) -> None:
        namespace = PID_NAMESPACE.stat().st_ino if PID_NAMESPACE.exists() else 0
        self._lines[self._rank, [PROCESS, NAMESPACE]] = os.getpid(), namespace
        self._publish(self._lines, self._rank, JOINED)
        deadline = time.monotonic() + timeout
        start = time.monotonic()
        while self._first_late(self._lines, JOINED, SPINS) >= 0:
            if is_abandoned() or time.monotonic() > deadline:
                num_missing = int((self._lines[:, ROUND] < JOINED).sum())
                self.close()
                why = "" if is_abandoned() else f" within {timeout:g} s"
                raise LaunchError(
                    f"rank {self._rank} of {len(self._lines)} could not join the others in shared memory:"
                    f" {num_missing} of them did not join{why}"
                )
            _pause(time.monotonic() - start)
        for rank, line in enumerate(self._lines.tolist()):
            if line[NAMESPACE] == namespace:  # else the number is another process's here
                with contextlib.suppress(psutil.Error):  # hidden from this user
                    self._processes[rank] = psutil.Process(line[PROCESS])

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        rows = received.numpy().reshape(len(self._lines), -1)
        for first, theirs in self.rounds(sent.numpy()):
            rows[:, first : first + theirs.shape[1]] = theirs

    def rounds(self, row: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Gather a row, [n] int64 with the same n on every replica, in several rounds.

        Yields (first, rows): offset of the round's m integers in the row; all replicas' integers, [R, m], a view of the
        shared memory that is valid until the next round. Raises PassFailedError if a peer calls `fail` instead.
        """
        for first in range(0, len(row), self._buffer_words):
            part = row[first : first + self._buffer_words]
            theirs = self._exchange(part)
            num_sent = theirs[:, 0]
            if (num_sent != len(part)).any():
                counts = num_sent.tolist()
                if min(counts) < 0:
                    raise PassFailedError(_reported(theirs))
                raise ReplicaError(f"rank {self._rank}: replicas sent different numbers of integers, {counts}")
            yield first, theirs[:, 1 : 1 + len(part)]

    def fail(self, number: int) -> list[int]:
        """Make the peers' current or next round fail: their `rounds` raise PassFailedError.

        Reports `number`, >= 0, to the peers. Returns by rank the number that each of them reports: the first integer of
        its row, or the argument of its `fail`.
        """
        return _reported(self._exchange(np.empty(0, np.int64), count=-1 - number))

    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        # The first round has the length and what fits after it: a second one would double a short message's latency.
        words = np.empty(0, np.int64)
        if data is not None:
            words = np.frombuffer(len(data).to_bytes(8, sys.byteorder) + data + bytes(-len(data) % 8), np.int64)
        received = self._exchange(words[: self._buffer_words], is_patient)[0, 1:]
        num_bytes = int(received[0])
        message = np.empty(1 + -(-num_bytes // 8), np.int64)
        message[: self._buffer_words] = received[: len(message)]
        for first in range(self._buffer_words, len(message), self._buffer_words):
            end = min(first + self._buffer_words, len(message))
            message[first:end] = self._exchange(words[first:end])[0, 1 : 1 + end - first]
        return message[1:].tobytes()[:num_bytes]

    def _exchange(self, row: np.ndarray, is_patient: bool = False, count: int | None = None) -> np.ndarray:
        """Publish a row, [n] int64 with n <= buffer_words, and wait for the rows of all peers.

        Returns a [R, 1 + buffer_words] view of each replica's number of integers (of this one `count`, if given) and
        its row; valid until the next call. A patient wait has no limit while the peers are alive.
        """
        if self._is_aborted:
            raise self._lost("the group was aborted")
        self._round += 1
        buffer = self._buffers[self._round % 2]
        mine = buffer[self._rank]
        mine[0], mine[1 : 1 + len(row)] = len(row) if count is None else count, row
        self._publish(self._lines, self._rank, self._round)
        if self._first_late(self._lines, self._round, SPINS) >= 0:
            self._wait(None if is_patient else self._step_timeout, ALERT_SECONDS if is_patient else 0.0)
        return buffer

    def _wait(self, timeout: float | None, alert_seconds: float) -> None:
        """Wait up to `timeout` seconds (None: no limit) until every replica has published the current round."""
        start = time.monotonic()
        next_check = start + CHECK_SECONDS
        while (rank := self._first_late(self._lines, self._round, 1)) >= 0:
            waited = time.monotonic() - start
            if self._is_aborted:
                raise self._lost("the group was aborted")
            is_gone = bool(self._lines[rank, HAS_LEFT])
            if start + waited >= next_check:
                next_check = start + waited + CHECK_SECONDS
                is_gone = is_gone or self._has_ended(rank)
            # Check the round once more: the peer may have published it just before it left or ended.
            if is_gone and self._first_late(self._lines, self._round, 1) == rank:
                raise self._lost(f"rank {rank} is gone")
            if timeout is not None and waited > timeout:
                raise self._lost(f"rank {rank} did not answer within {timeout:g} s")
            _pause(waited, alert_seconds, self._has_cores)

    def _has_ended(self, rank: int) -> bool:
        """Whether a replica's process has ended; False if the process is not visible from here."""
        process = self._processes.get(rank)
        try:
            return process is not None and (not process.is_running() or process.status() in ENDED)
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:  # the process cannot be inspected: rely on the timeout
            return False

    def _lost(self, reason: str) -> ReplicaError:
        return ReplicaError(f"rank {self._rank} lost a peer in the exchange: {reason}")

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        self._lines[self._rank, HAS_LEFT] = 1


def _reported(rows: np.ndarray) -> list[int]:
    """Return what each rank reports in a round that fails; see `SharedMemoryTransport.fail`."""
    return [-1 - count if count < 0 else first for count, first in rows[:, :2].tolist()]


def _pause(waited: float, alert_seconds: float = 0.0, has_cores: bool = False) -> None:
    """Yield the CPU, or sleep if `waited` seconds exceed YIELD_SECONDS.

    Up to `alert_seconds` it yields, too, if each replica has a core to poll on, else sleeps only briefly.
    """
    if waited < YIELD_SECONDS or (has_cores and waited < alert_seconds):
        os.sched_yield()
    elif waited < alert_seconds:
        time.sleep(SHORT_SLEEP_SECONDS)
    else:
        time.sleep(min(MAX_SLEEP_SECONDS, SLEEP_FRACTION * waited))


@compiles
def compile_shared_memory() -> None:
    _kernels()


@functools.cache
def _kernels() -> tuple[Callable[[np.ndarray, int, int], None], Callable[[np.ndarray, int, int], int]]:
    lines = np.zeros((1, LINE_WORDS), np.int64)
    return bound(_publish, lines, 0, 0), bound(_first_late, lines, 0, 0)


@compiled(makes_arrays=True)
def _publish(lines, rank, number):
    """Write a round's number into the replica's line, with release order after its earlier writes."""
    store_release(lines.ravel(), rank * lines.shape[1], number)


@compiled(makes_arrays=True)
def _first_late(lines, number, num_looks):
    """Return the first rank that has not published the round `number`; -1 if all have.

    Polls lines, [R, LINE_WORDS], that lack the round `num_looks` times, >= 1, before it gives up.
    """
    words = lines.ravel()
    rank = 0
    while rank < lines.shape[0]:
        if load_acquire(words, rank * lines.shape[1]) >= number:
            rank += 1
        elif num_looks > 1:
            num_looks -= 1
        else:
            return rank
    return -1
