"""Functions compiled by Numba, and kept on disk where there is a place for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from numba import njit

_functions: list = []  # all that are compiled, to find what is kept of them


def compiled(function: Callable) -> Callable:
    """Compile a function when it is first called; where nothing can be kept, anew in every process."""
    try:
        made = njit(cache=True)(function)
    except RuntimeError:  # no folder that can be written to
        made = njit(function)
    _functions.append(made)
    return made


def with_fresh_cache(use: Callable[[], None]) -> None:
    """Call something that compiles; if it fails, once more, with nothing kept: that may be of another version."""
    try:
        use()
    except Exception:
        forget_compiled()
        use()


def forget_compiled() -> None:
    """Delete what is kept on disk: another version of this package may have left what cannot be read any more."""
    for function in _functions:
        folder, module = Path(function.stats.cache_path or ""), function.py_func.__module__.rpartition(".")[2]
        for file in folder.glob(f"{module}.*.nb?") if function.stats.cache_path else ():
            with contextlib.suppress(OSError):
                file.unlink()
