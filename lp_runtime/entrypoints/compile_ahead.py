"""Compiling the drafter in a second process, while a command imports torch and loads its model."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.lookahead.drafters.best_first import growth
from lp_runtime.lookahead.drafters.best_first.drafter import compile_kernels
from lp_runtime.utils.child_process import python_command
from lp_runtime.utils.jit import is_cached


@contextlib.contextmanager
def compiling_ahead(config: RuntimeConfig) -> Iterator[None]:
    """Compile what replicas on this machine will need and what is not on disk, until this is left."""
    if config.lookahead.drafter != "full" or config.launcher.name == "ray" or is_cached(growth.grow):
        yield
        return
    command = python_command("lp_runtime.entrypoints.compile_ahead")
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    with process:
        try:
            yield
        finally:
            process.kill()


def _end_with_parent() -> None:
    """End this process when its parent ends, however that happens."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    compile_kernels()
