"""Compilation of code for steps, which takes seconds; partly in a second process, during imports and first requests."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.partition import capacity_fill
from lp_runtime.engine.step_compilers import first_compilers, step_compilers
from lp_runtime.lookahead.drafters.best_first import growth, outcome
from lp_runtime.sampling import packing
from lp_runtime.sizing import best_size
from lp_runtime.utils.files import is_locked
from lp_runtime.utils.jit import cache_root, compile_in_turns, is_cached
from lp_runtime.utils.startup import python_command

SHARED = "shared"  # argument of the second process: several replicas share each step
# What takes longest to compile, of all replicas and of those that share steps.
LONGEST = (growth.grow, outcome.advance, packing.pack_top_k)
LONGEST_SHARED = (best_size.best_capacity, capacity_fill.fill_shares)

_is_command = threading.Event()


class CompileProcess:
    """A second process that compiles while this one goes on. It ends with this process, and holds a lock until then."""

    def __init__(self, lock: IO, is_shared: bool):
        command = [*python_command("lp_runtime.replica.compile_ahead"), *([SHARED] if is_shared else [])]
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,  # Ctrl-C reaches only this process
            pass_fds=[lock.fileno()],
        )
        threading.Thread(target=self._process.wait, daemon=True).start()  # or it would be a zombie next to a server

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def compiling_ahead(config: RuntimeConfig, is_shared: bool = False) -> Iterator[None]:
    """Compile code for this machine's replicas in a second process, which ends with the `with` block.

    It is not started if the code is cached on disk or is being compiled, if Ray runs the replicas, or with a drafter
    other than `full`. `is_shared`: whether several replicas share each step, whatever the settings say.
    """
    _is_command.set()
    is_shared = is_shared or config.num_gpus > 1
    process = None
    if config.lookahead.drafter == "full" and config.launcher.name != "ray" and not is_compiled(is_shared):
        with contextlib.suppress(OSError), open(_lock_file(), "a") as lock:  # not if another process holds the lock
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = CompileProcess(lock, is_shared)
    try:
        yield
    finally:
        if process is not None:
            process.stop()


def is_command() -> bool:
    """Return whether this process runs a command, which has called `compiling_ahead`."""
    return _is_command.is_set()


def is_compiling_ahead(is_shared: bool) -> bool:
    """Return whether the drafter is not compiled yet, and a second process on this machine is busy with it.

    `is_shared`: whether several replicas share each step.
    """
    return not is_compiled(is_shared) and is_locked(_lock_file())


def is_compiled(is_shared: bool) -> bool:
    """Return whether what takes longest to compile is on disk; also if nothing can be cached."""
    return all(map(is_cached, (*LONGEST, *(LONGEST_SHARED if is_shared else ()))))


def compile_steps(is_shared: bool) -> None:
    """Compile, or load from disk, the code of steps with drafter=full, except code that imports torch.

    Of several processes that do so, each waits for what the others compile. `is_shared`: whether several replicas share
    each step.
    """
    compile_in_turns([*first_compilers(is_shared), *step_compilers(is_full=True, is_shared=is_shared)])


def _lock_file() -> Path:
    """Return the path of the lock, by the digest of the drafter's sources and of the CPU."""
    return cache_root() / f"compile_ahead.{Path(growth.grow.stats.cache_path).name}.lock"


if __name__ == "__main__":
    compile_steps(is_shared=SHARED in sys.argv)
