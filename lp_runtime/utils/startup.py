"""Start of processes: commands of children, faster imports with fewer warnings, progress on stderr."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as its spawn does

# The path's entries are separate arguments, after their number: Linux limits each argument to 128 KiB.
RUN_MODULE = (
    "import sys; end = int(sys.argv[1]) + 2; sys.path[:] = sys.argv[2:end]; del sys.argv[1:end];"
    " from lp_runtime.utils.startup import end_with_parent; end_with_parent({parent});"
    " import runpy; runpy.run_module({module!r}, None, '__main__', True)"
)
PARENT_CHECK_SECONDS = 1.0  # between checks whether the parent is alive
START_STAGES = 5  # stages of a replica's start: compiling, loading, optimizing, checking, measuring


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a child process that runs a module of this package.

    The child gets this process's `sys.path` and interpreter flags, like a multiprocessing child. `python -m` would put
    the working directory first, so a `random.py` there would shadow the standard library's module. The child ends soon
    after this process.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # '' is the working directory
    code = RUN_MODULE.format(module=module, parent=os.getpid())
    return [sys.executable, *_args_from_interpreter_flags(), "-P", "-c", code, str(len(path)), *path, *arguments]


def end_with_parent(parent: int) -> None:
    """End this process once its parent is not the process `parent` any more, even if that was killed.

    A pipe to the parent may stay open longer: processes that were forked from the parent hold copies of its end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(0)

    with contextlib.suppress(RuntimeError):  # no thread can be started: the pipe must do
        threading.Thread(target=watch, daemon=True).start()


def hide_triton_without_gpu() -> None:
    """Make `import triton` fail if this process has no GPU; call it before importing transformers.

    transformers imports torch._dynamo, which imports Triton wherever it is installed. Without a GPU that only costs
    time, and Triton 3.9 prints about 30 lines at exit.
    """
    import torch

    with warnings.catch_warnings():
        # distributed/devices.py reports this in one line.
        warnings.filterwarnings("ignore", "CUDA initialization", UserWarning)
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # a None entry makes the import fail


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during heavy imports, and exempt their objects from later collections.

    Modules live as long as the process, but the collector would scan them repeatedly during the imports and once more
    at exit: 2 of the 5 seconds of a process that imports torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class Progress:
    """Numbers the stages of a start and prints each with the seconds elapsed so far."""

    def __init__(self, is_shown: bool, num_stages: int = START_STAGES):
        self._is_shown, self._num_stages = is_shown, num_stages
        self._num_begun = 0
        self._started = time.monotonic()

    def begin(self, what: str) -> None:
        """Announce that the next stage, `what` in a few words, begins; ignored after the last stage."""
        if self._num_begun == self._num_stages:
            return
        self._num_begun += 1
        if self._is_shown:
            seconds = time.monotonic() - self._started
            print(
                f"starting, {self._num_begun} of {self._num_stages} ({seconds:.0f} s): {what}",
                file=sys.stderr,
                flush=True,
            )
