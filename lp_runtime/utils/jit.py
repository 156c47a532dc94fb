"""Functions compiled by Numba, and cached on disk by the content of their sources.

Our compiled functions call each other and share constants across files. So the cache folder of a function is named
after a digest of the files in the function's folder and of those of its package that they import, directly or not.
Copies of the package share compiled code, wherever they lie: every Ray job runs from a fresh copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numba
from numba.core.caching import _CacheLocator
from numba.core.dispatcher import Dispatcher
from numba.extending import register_jitable

from lp_runtime.errors import ConfigError

CACHE_DIR = "~/.cache/lp_runtime/numba"  # unless NUMBA_CACHE_DIR names another
MAX_AGE_SECONDS = 30 * 24 * 3600  # of compiled code; older code is deleted when new code is cached
IMPORT = re.compile(r"^from ([\w.]+) import (.*)", re.MULTILINE)

_numba_config = vars(numba.config)  # the module makes its names as it is imported

if _numba_config["DISABLE_JIT"]:
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
        _cache_folders.add(Path(dispatcher.stats.cache_path))
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


def is_cached(function: Dispatcher) -> bool:
    """Whether compiled code of a function is on disk, or could not be kept there."""
    folder = function.stats.cache_path
    return folder is None or any(Path(folder).glob(f"*.{function.py_func.__name__}-*.nbi"))


class ContentLocator(_CacheLocator):
    """Tells Numba where to cache a function: in a folder named after the content of the function's sources."""

    def __init__(self, function: Callable, file: str):
        self._py_file, self._lineno = file, function.__code__.co_firstlineno  # Numba names them in warnings
        self._digest = _digest_of(Path(file).parent)

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> ContentLocator | None:
        """Return the locator of a function, or None if its folder cannot be written to."""
        locator = cls(py_func, py_file)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator

    def get_cache_path(self) -> str:
        """Return the function's cache folder."""
        return str(cache_root() / self._digest)

    def get_source_stamp(self) -> str:
        """Return what cached code was compiled from."""
        return self._digest

    def get_disambiguator(self) -> str:
        """Return what tells functions of one name apart."""
        return str(self._lineno)


_numba_config["CACHE_LOCATOR_CLASSES"] = f"{__name__}.{ContentLocator.__name__}"


def cache_root() -> Path:
    """Return the folder that holds the cache folders of all functions."""
    return Path(_numba_config["CACHE_DIR"] or CACHE_DIR).expanduser()


@functools.cache
def _digest_of(folder: Path) -> str:
    """Return a digest of a folder's sources; delete old compiled code of other sources if there is none of these."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(_sources(folder)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    name = digest.hexdigest()
    if not (cache_root() / name).exists():
        with contextlib.suppress(OSError):
            for old in cache_root().iterdir():
                if old.stat().st_mtime < time.time() - MAX_AGE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
    return name


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


def compiles(use: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls `use`, which compiles functions or loads them from disk, once a process.

    Of several processes that call it at the same time, one compiles; the others wait, and load its code from disk. If
    `use` fails, all cached code, which may be damaged, is deleted and `use` is called again.
    """

    @functools.cache
    @functools.wraps(use)
    def compile_once() -> None:
        with _compile_lock(use):
            try:
                use()
            except Exception:
                for cache_folder in _cache_folders:
                    _delete_cached(cache_folder)
                use()

    return compile_once


def compile_in_turns(compilers: Sequence[Callable[[], None]]) -> None:
    """Call functions that `compiles` returned, first those that no other process is calling.

    So processes that start together, as replicas do, share the work of compiling.
    """
    pending = list(compilers)
    while pending:
        compiler = next((each for each in pending if not _is_compiling(each)), pending[0])
        pending.remove(compiler)
        compiler()


@contextlib.contextmanager
def _compile_lock(compiler: Callable) -> Iterator[None]:
    """Hold the lock of what a function compiles, among the processes that share a cache; none without a cache."""
    lock = _open_lock(compiler)
    if lock is None:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_compiling(compiler: Callable) -> bool:
    """Whether another process holds the lock of what a function compiles."""
    lock = _open_lock(compiler)
    if lock is None:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _open_lock(compiler: Callable) -> IO | None:
    """Open the lock file of what a function compiles; None if nothing can be cached, so that nothing can be shared."""
    try:
        name = f"{compiler.__module__}.{compiler.__name__}.lock"
        return open(cache_root() / name, "a") if _cache_folders else None
    except OSError:
        return None


def _delete_cached(cache_folder: Path) -> None:
    """Delete the compiled code in a cache folder."""
    for file in cache_folder.glob("*.nb?"):
        with contextlib.suppress(OSError):
            file.unlink()
