"""Real processes for tests, with a mark in their environment by which all descendants are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.forked import living_processes

MARK = "LP_RUNTIME_TEST"
PATIENCE = 300.0  # seconds before a test gives up waiting; not a performance bound

# For clusters that tests start. By default Ray gives actors a lower priority than the other test process has.
RAY_SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}


class Marked:
    """An environment with a unique mark, which every process started with it and its children carry."""

    def __init__(self, **variables: str):
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        self.environment[MARK] = self._mark.partition("=")[2]

    def alive(self) -> list[int]:
        """Return the ids of living processes with the mark, orphans included, and of their descendants.

        Ray's processes overwrite their environment with their title, so they are found by their parents.
        """
        results, parents = set(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                pid = int(folder.name)
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[pid] = int(parent)
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    results.add(pid)
            except OSError:
                continue
        while more := {pid for pid, parent in parents.items() if parent in results} - results:
            results |= more
        return sorted(results & parents.keys())

    def workers(self) -> list[int]:
        """Return the ids of living processes that are spawned replicas."""
        return [pid for pid in self.alive() if "lp_runtime.launchers.worker.replica_process" in command_line(pid)]

    def assert_gone(self) -> None:
        """Wait until none is alive."""
        wait_until(lambda: not self.alive(), lambda: f"left running: {[command_line(pid) for pid in self.alive()]}")

    def kill(self) -> None:
        """Kill all processes that still carry the mark."""
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def one_core() -> Iterator[None]:
    """Give processes that are started in this context one core, so that a lone replica has one thread.

    Next to another test's replica, several threads would wait for one another most of the time.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores) if os.getpid() % 2 else max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def marked(**variables: str) -> Iterator[Marked]:
    """Yield a Marked environment; kill all its processes at the end, whatever happens."""
    mark = Marked(**variables)
    try:
        yield mark
    finally:
        mark.kill()


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def own_replicas() -> list[int]:
    """Return the ids of living replicas that this process has spawned or forked, sorted."""
    children = []
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        children += [int(pid) for pid in file.read_text().split()]
    started = [pid for pid in children if "lp_runtime.launchers.worker.replica_process" in command_line(pid)]
    return sorted(started + living_processes())


def wait_until(condition: Callable[[], object], complaint: Callable[[], str] = lambda: "waited in vain") -> None:
    """Return when the condition holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.05)


def run_cli(*arguments: str, cwd: Path, environment: dict | None = None) -> subprocess.CompletedProcess:
    """Run `python -m lp_runtime` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lp_runtime", *arguments],
        cwd=cwd,
        env=environment or Marked().environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def start_cli(*arguments: str, cwd: Path, environment: dict) -> subprocess.Popen:
    """Start `python -m lp_runtime`; its stdout and stderr are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "lp_runtime", *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # If a shell runs these tests in the background, they ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def in_fork(*calls: Callable[[], object]) -> list[str]:
    """Return what each call gives in a process forked from this one: "ErrorName: message", or its result as text."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads may hold locks, which callers test
        child = os.fork()
    if child == 0:
        for call in calls:
            try:
                answer = str(call())
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(theirs, f"{answer}\n".encode())
        os._exit(0)
    os.close(theirs)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0], lambda: "the forked process hangs")
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    with os.fdopen(ours) as file:
        return file.read().splitlines()
