"""Functions compiled by Numba, and cached on disk where there is a place for that.

Numba compares a function's own file with its cache to tell whether the cached code is still good. Ours call each other
and share constants across files, so what is cached is good only while no file of the function's folder has changed, nor
any file of the package that one of those imports, directly or not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import numba
from numba.core.dispatcher import Dispatcher
from numba.extending import register_jitable

from lp_runtime.errors import ConfigError

STAMP_NAME = "lp_runtime.sources"  # file in a cache folder: digest of the sources that its contents were compiled from
IMPORT = re.compile(r"^from ([\w.]+) import (.*)", re.MULTILINE)

if numba.config.DISABLE_JIT:
    raise ConfigError("NUMBA_DISABLE_JIT=1: must be unset; a step would take seconds without compiled code")

NO_ARRAYS = {"_nrt": False, "forceinline": True}  # Numba's options for functions that make no arrays or views

_cache_folders: set[Path] = set()  # where the functions of this process are cached, like any function's own cache


@overload
def compiled(function: Callable, /) -> Dispatcher: ...


@overload
def compiled(
    *, makes_arrays: bool = False, fastmath: frozenset[str] = frozenset()
) -> Callable[[Callable], Dispatcher]: ...


def compiled(
    function: Callable | None = None, *, makes_arrays: bool = False, fastmath: frozenset[str] = frozenset()
) -> Dispatcher | Callable[[Callable], Dispatcher]:
    """Compile a function when it is first called, and cache the code on disk where that is possible.

    Args:
        function: the function; None to return a decorator.
        makes_arrays: whether the function, or one that it calls, makes arrays or views. Without, references are not
            counted, which took a third of the time of the functions that are called most; and the function becomes a
            part of compiled functions that call it, where handing on the arrays took another third.
        fastmath: what LLVM may do to sums and products of floating-point numbers, in LLVM's words.
    """
    if function is None:
        return functools.partial(compiled, makes_arrays=makes_arrays, fastmath=fastmath)
    options: dict[str, Any] = {"fastmath": set(fastmath)} if fastmath else {}
    if not makes_arrays:
        options |= NO_ARRAYS
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
        if dispatcher.stats.cache_path:
            cache_folder = Path(dispatcher.stats.cache_path)
            _check_sources(Path(function.__code__.co_filename).parent, cache_folder)
            _cache_folders.add(cache_folder)
    except (RuntimeError, OSError):  # no folder that can be written to
        dispatcher = numba.njit(**options)(function)
    return dispatcher


def inlined(function: Callable | None = None, *, makes_arrays: bool = False) -> Callable:
    """Mark a function as part of the compiled functions that call it; Python callers run it as plain Python.

    It has no entry point for Python and no file in the cache, which is two thirds of the time that compiling it on its
    own takes.

    Args:
        function: the function; None to return a decorator.
        makes_arrays: see `compiled`.
    """
    if function is None:
        return functools.partial(inlined, makes_arrays=makes_arrays)
    return register_jitable(function) if makes_arrays else register_jitable(**NO_ARRAYS)(function)


def bound(function: Dispatcher, *args: object) -> Callable:
    """Return the machine code of a compiled function for arguments of the types of `args`; it must always get those.

    A call of the function itself looks at the types of its arguments first: with a hundred arrays in them that takes
    10 us, and with cold caches 40.
    """
    return function.compile(tuple(numba.typeof(arg) for arg in args))


@functools.cache
def _check_sources(folder: Path, cache_folder: Path) -> None:
    """Delete cached code that was compiled from other sources than a folder's present ones."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(_sources(folder)):
        digest.update(file.read_bytes())
    stamp = cache_folder / STAMP_NAME
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest.hexdigest():
            return
    _delete_cached(cache_folder)
    stamp.write_text(digest.hexdigest())  # one that is torn agrees with nothing


def _sources(folder: Path) -> set[Path]:
    """Return a folder's source files and those of its package that they import, directly or not."""
    found, pending = set(), list(folder.glob("*.py"))
    while pending:
        file = pending.pop()
        if file not in found:
            found.add(file)
            pending += _imported(file)
    return found


@functools.cache
def _imported(file: Path) -> list[Path]:
    """Return the files of its own top package, or else of its own folder, that a source file imports."""
    package = next((parent for parent in file.parents if not (parent / "__init__.py").exists()), file.parent)
    files = []
    for module, names in IMPORT.findall(file.read_text()):
        path = package.joinpath(*module.split("."))
        files += [path.with_suffix(".py"), *(path / f"{name}.py" for name in re.findall(r"\w+", names))]
    return [each for each in files if each.is_file()]


def with_fresh_cache(use: Callable[[], object]) -> None:
    """Call something that compiles; if it fails, delete all cached code, which may be damaged, and call it again."""
    try:
        use()
    except Exception:
        for cache_folder in _cache_folders:
            _delete_cached(cache_folder)
        use()


def _delete_cached(cache_folder: Path) -> None:
    """Delete the compiled code in a cache folder."""
    for file in cache_folder.glob("*.nb?"):
        with contextlib.suppress(OSError):
            file.unlink()
