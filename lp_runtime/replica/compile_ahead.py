"""Compilation of code for steps, which takes seconds; partly in a second process during imports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.engine.step_compilers import step_compilers
from lp_runtime.lookahead.drafters.best_first import growth
from lp_runtime.utils.jit import compile_in_turns, is_cached
from lp_runtime.utils.startup import python_command

SHARED = "shared"  # argument of the second process: several replicas share each step


@contextlib.contextmanager
def compiling_ahead(config: RuntimeConfig) -> Iterator[None]:
    """Compile code for this machine's replicas in a second process while the `with` block runs.

    It is not started if the code is cached on disk, if Ray runs the replicas, or with a drafter other than `full`.
    """
    if config.lookahead.drafter != "full" or config.launcher.name == "ray" or is_cached(growth.grow):
        yield
        return
    command = [*python_command("lp_runtime.replica.compile_ahead"), *([SHARED] if config.num_gpus > 1 else [])]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    with process:
        try:
            yield
        finally:
            process.kill()


def compile_steps(is_shared: bool) -> None:
    """Compile, or load from disk, the code of steps with drafter=full, except code that imports torch.

    `is_shared`: whether several replicas share each step.
    """
    compile_in_turns(step_compilers(is_full=True, is_shared=is_shared))


def _end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""
    sys.stdin.read()  # returns when the parent's end of the pipe closes
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    compile_steps(is_shared=SHARED in sys.argv)
