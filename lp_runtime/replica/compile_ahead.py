"""Compilation of code for steps, which takes seconds; partly in a second process, during imports and first requests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.engine.step_compilers import pass_compilers, step_compilers
from lp_runtime.lookahead.drafters.best_first import growth, outcome
from lp_runtime.utils.files import is_locked
from lp_runtime.utils.jit import cache_root, compile_in_turns, is_cached
from lp_runtime.utils.startup import python_command

SHARED = "shared"  # argument of the second process: several replicas share each step
LOCK_FILE = "compile_ahead.lock"  # below the cache root; the second process holds it until it ends


class CompileProcess:
    """A second process that compiles while this one goes on. It ends with this process."""

    def __init__(self, lock: IO, is_shared: bool):
        command = [*python_command("lp_runtime.replica.compile_ahead"), *([SHARED] if is_shared else [])]
        self._is_shared = is_shared
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,  # Ctrl-C reaches only this process
            pass_fds=[lock.fileno()],
        )

    def wait(self, what: str) -> None:
        """Help to compile until everything is compiled, and say what for; Ctrl-C ends that early."""
        if self._process.poll() is not None:
            return
        print(f"compiling {what}", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            compile_steps(self._is_shared)
            self._process.wait()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def compiling_ahead(config: RuntimeConfig, is_shared: bool = False) -> Iterator[CompileProcess | None]:
    """Compile code for this machine's replicas in a second process, which ends with the `with` block.

    It is not started if the code is cached on disk or is being compiled, if Ray runs the replicas, or with a drafter
    other than `full`. `is_shared`: whether several replicas share each step, whatever the settings say.
    """
    process = None
    if config.lookahead.drafter == "full" and config.launcher.name != "ray" and not _is_compiled():
        with contextlib.suppress(OSError), open(_lock_file(), "a") as lock:  # not if another process holds the lock
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = CompileProcess(lock, is_shared=is_shared or config.num_gpus > 1)
    try:
        yield process
    finally:
        if process is not None:
            process.stop()


def is_compiling_ahead() -> bool:
    """Return whether the drafter is not compiled yet, and a second process on this machine is busy with it."""
    return not _is_compiled() and is_locked(_lock_file())


def compile_steps(is_shared: bool) -> None:
    """Compile, or load from disk, the code of steps with drafter=full, except code that imports torch.

    `is_shared`: whether several replicas share each step.
    """
    compile_in_turns([*pass_compilers(), *step_compilers(is_full=True, is_shared=is_shared)])


def _is_compiled() -> bool:
    """Return whether what takes longest is on disk; also if nothing can be cached."""
    return is_cached(growth.grow) and is_cached(outcome.advance)


def _lock_file() -> Path:
    return cache_root() / LOCK_FILE


def _end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""
    sys.stdin.read()  # returns when the parent's end of the pipe closes
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    compile_steps(is_shared=SHARED in sys.argv)
