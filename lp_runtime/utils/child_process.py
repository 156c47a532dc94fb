"""Python child processes that import what their parent imports."""

from __future__ import annotations

import os
import sys
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as its spawn does

RUN_MODULE = "import sys; sys.path[:] = {path}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a child process that runs a module of this package.

    The child gets this process's `sys.path` and interpreter flags, like a multiprocessing child. `python -m` would put
    the working directory first, so a `random.py` there would shadow the standard library's module.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # '' is the working directory
    code = RUN_MODULE.format(path=path, module=module)
    return [sys.executable, *_args_from_interpreter_flags(), "-P", "-c", code, *arguments]
