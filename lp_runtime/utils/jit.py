"""Functions compiled by Numba, and kept on disk where there is a place for it.

Numba looks at a function's own file to tell whether what it kept is still good; ours call each other across files, so
what was kept is good only while none of the files in the function's folder has changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numba

STAMP_NAME = "lp_runtime.sources"
_functions: list = []  # all that are compiled, to find what is kept of them


def compiled(
    function: Callable | None = None, *, makes_arrays: bool = False, fastmath: frozenset[str] = frozenset()
) -> Callable:
    """Compile a function when it is first called; where nothing can be kept, anew in every process.

    Args:
        makes_arrays: whether it, or what it calls, makes arrays or views. Else nothing need be counted: counting
            references took a third of the time of those that are called most. Nor is it called then by others that are
            compiled, but becomes a part of them: to hand on the arrays took another third.
        fastmath: what may be done to sums and products of floating-point numbers, in LLVM's words.
    """
    if function is None:
        return functools.partial(compiled, makes_arrays=makes_arrays, fastmath=fastmath)
    options = {"fastmath": set(fastmath)} if fastmath else {}
    if not makes_arrays:
        options |= {"_nrt": False, "forceinline": True}
    try:
        made = numba.njit(cache=True, **options)(function)
        if made.stats.cache_path:
            _check_sources(Path(function.__code__.co_filename).parent, Path(made.stats.cache_path))
    except (RuntimeError, OSError):  # no folder that can be written to
        made = numba.njit(**options)(function)
    _functions.append(made)
    return made


def bound(function: Callable, *args) -> Callable:
    """The code of a compiled function for arguments of the types of these, which it must always be given.

    Called itself, the function looks at the types of its arguments first: with a hundred arrays in them that takes
    10 us, and with cold caches 40.
    """
    return function.compile(tuple(numba.typeof(arg) for arg in args))


@functools.cache
def _check_sources(folder: Path, kept: Path) -> None:
    """Forget what was compiled from other sources than a folder's present ones."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    stamp = kept / STAMP_NAME
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest.hexdigest():
            return
    _forget(kept)
    stamp.write_text(digest.hexdigest())  # one that is torn agrees with nothing


def with_fresh_cache(use: Callable[[], None]) -> None:
    """Call something that compiles; if it fails, once more, with nothing kept: that may be damaged."""
    try:
        use()
    except Exception:
        for kept in {function.stats.cache_path for function in _functions} - {None}:
            _forget(Path(kept))
        use()


def _forget(kept: Path) -> None:
    for file in kept.glob("*.nb?"):
        with contextlib.suppress(OSError):
            file.unlink()
