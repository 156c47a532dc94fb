"""Numba-compiled functions, cached on disk by the content of their sources.

Our compiled functions call each other and share constants across files. So a function's cache folder is named after a
digest of all files in the function's folder and of the files that they import from their package or from lp_runtime,
directly or indirectly. Copies of the package in different places share compiled code: every Ray job runs from a fresh
copy. The digest includes the CPU that the code is compiled for, so machines with different CPUs can share a cache
folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba.core.caching import _CacheLocator
from numba.core.codegen import get_host_cpu_features
from numba.core.dispatcher import Dispatcher
from numba.extending import register_jitable

from lp_runtime.errors import ConfigError
from lp_runtime.utils.files import is_locked, locked_if_possible

log = logging.getLogger(__name__)

Int = int | np.int64  # the same type in compiled code

CACHE_DIR = "~/.cache/lp_runtime/numba"  # default; NUMBA_CACHE_DIR overrides it
MAX_AGE_SECONDS = 30 * 24 * 3600  # compiled code older than this is deleted when new code is cached
SOURCE_ROOT = Path(__file__).parents[2]  # contains the package lp_runtime
IMPORT = re.compile(r"^from ([\w.]+) import (.*)", re.MULTILINE)

_numba_config = vars(numba.config)  # numba creates these names at import, so type checkers do not know them

if _numba_config["DISABLE_JIT"]:
    raise ConfigError("NUMBA_DISABLE_JIT=1: must be unset; a step would take seconds without compiled code")

NO_ARRAYS = {"_nrt": False, "forceinline": True}  # Numba options for functions that create no arrays or views

_cache_folders: set[Path] = set()  # cache folders of this process's compiled functions


class UnsavedCode:
    """Why compiled code cannot be kept on disk, reported once.

    Attributes:
        is_silent: leave the report to another process; set in all but one of a machine's replicas.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self._reason: str | None = None  # the first one; None if all code could be kept
        self._is_reported = False

    def note(self, where: str, error: Exception) -> None:
        """Record a reason. It is not logged yet: modules are imported before the program configures logging."""
        if self._reason is None:
            self._reason = f"{where}, so each start compiles it again: {getattr(error, 'strerror', None) or error}"

    def report(self) -> None:
        if self._reason is not None and not self.is_silent and not self._is_reported:
            self._is_reported = True
            remedy = "set NUMBA_CACHE_DIR, or cache_dir of a command, to a folder that can be written"
            log.warning("compiled code cannot be kept %s; %s", self._reason, remedy)


UNSAVED = UnsavedCode()


def compiled(
    function: Callable | None = None, *, makes_arrays: bool = False, fastmath: frozenset[str] = frozenset()
) -> Any:  # a Dispatcher, whose calls are untyped, or a decorator if `function` is None
    """Compile a function with Numba at its first call, and cache the machine code on disk if possible.

    `makes_arrays` is whether the function, or one that it calls, creates arrays or views. If not, reference counting is
    switched off, which took a third of the time of the functions called most; and the function is inlined into its
    compiled callers, where passing the arrays took another third.
    """
    if function is None:
        return functools.partial(compiled, makes_arrays=makes_arrays, fastmath=fastmath)
    options: dict[str, Any] = {"fastmath": set(fastmath)} if fastmath else {}
    if not makes_arrays:
        options |= NO_ARRAYS
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
        folder = Path(dispatcher.stats.cache_path)
        _cache_folders.add(folder)
    except (RuntimeError, OSError):  # no cache folder that can be used, which `UNSAVED` knows
        return numba.njit(**options)(function)
    cache = dispatcher._cache  # noqa: SLF001 (Numba has no public name)
    cache.save_overload = functools.partial(_save_if_possible, cache.save_overload, folder)
    return dispatcher


def _save_if_possible(save: Callable[[object, object], None], folder: Path, signature: object, code: object) -> None:
    """Save compiled code in the cache folder; if the disk is full, only this process has it."""
    try:
        save(signature, code)
    except OSError as error:
        UNSAVED.note(f"in {folder.parent}", error)
        UNSAVED.report()


def inlined(function: Callable | None = None, *, makes_arrays: bool = False) -> Callable:
    """Mark a function for inlining into its compiled callers; Python callers run it as plain Python.

    It gets no entry point for Python and no cache file. Those are two thirds of the time to compile a small function.
    """
    if function is None:
        return functools.partial(inlined, makes_arrays=makes_arrays)
    return register_jitable(function) if makes_arrays else register_jitable(**NO_ARRAYS)(function)


def bound(function: Dispatcher, *args: object) -> Callable:
    """Return a compiled function's machine code for the types of `args`, which later calls must have.

    Calling the function itself inspects the types first: 10 us for a hundred arrays, 40 us with cold caches.
    """
    return function.compile(tuple(numba.typeof(arg) for arg in args))


def is_cached(function: Dispatcher) -> bool:
    """Return whether a function's machine code is on disk; true if it cannot be cached at all."""
    folder = function.stats.cache_path
    return folder is None or _has_code(Path(folder), function.py_func)


def _has_code(folder: Path, function: Callable) -> bool:
    return any(folder.glob(f"*.{function.__name__}-*.nbi"))


class ContentLocator(_CacheLocator):
    """Numba cache locator: the folder of a function is named after the content of its sources."""

    def __init__(self, function: Callable, file: str):
        self._py_file, self._lineno = file, function.__code__.co_firstlineno  # Numba's warnings read these attributes
        self._digest = _digest_of(Path(file).parent)

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> ContentLocator | None:
        """Return the locator of a function, or None if its cache folder can neither be written nor has its code."""
        try:
            locator = cls(py_func, py_file)
        except RuntimeError as error:  # this user has no home folder
            UNSAVED.note("on disk", error)
            return None
        try:
            locator.ensure_cache_path()
        except OSError as error:
            if not _has_code(Path(locator.get_cache_path()), py_func):  # else another user has compiled it
                UNSAVED.note(f"in {cache_root()}", error)
                return None
        return locator

    def get_cache_path(self) -> str:
        return str(cache_root() / self._digest)

    def get_source_stamp(self) -> str:
        return self._digest  # by which Numba detects stale code

    def get_disambiguator(self) -> str:
        return str(self._lineno)  # distinguishes functions of the same name


_numba_config["CACHE_LOCATOR_CLASSES"] = f"{__name__}.{ContentLocator.__name__}"


def cache_root() -> Path:
    """Return the folder that contains the cache folders of all functions."""
    return Path(_numba_config["CACHE_DIR"] or CACHE_DIR).expanduser()


@functools.cache
def _digest_of(folder: Path) -> str:
    """Return a digest of a folder's sources and of the target; delete expired code if none of this digest is cached."""
    digest = hashlib.blake2b(_target().encode(), digest_size=16)
    for file in sorted(_sources(folder)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    name = digest.hexdigest()
    if not (cache_root() / name).exists():
        with contextlib.suppress(OSError):
            for old in cache_root().iterdir():
                if old.stat().st_mtime < time.time() - MAX_AGE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
    return name


def _target() -> str:
    """Return what machine code is for, besides its sources: Python, Numba, and the CPU that Numba compiles for."""
    name, features = _numba_config["CPU_NAME"], _numba_config["CPU_FEATURES"]
    cpu = name or binding.get_host_cpu_name(), get_host_cpu_features() if features is None else features
    return " ".join([sys.implementation.cache_tag, numba.__version__, *cpu])


def _sources(folder: Path) -> set[Path]:
    files, pending = set(), list(folder.glob("*.py"))
    while pending:
        file = pending.pop()
        if file not in files:
            files.add(file)
            pending += _imported(file)
    return files


@functools.cache
def _imported(file: Path) -> list[Path]:
    # The folder that contains the top-level package; for a file outside any package, its own folder.
    package = next((parent for parent in file.parents if not (parent / "__init__.py").exists()), file.parent)
    files = []
    for module, names in IMPORT.findall(file.read_text()):
        for root in {package, SOURCE_ROOT}:
            path = root.joinpath(*module.split("."))
            files += [path.with_suffix(".py"), *(path / f"{name}.py" for name in re.findall(r"\w+", names))]
    return [each for each in files if each.is_file()]


def compiles(use: Callable[[], object]) -> Callable[[], None]:
    """Wrap `use`, which calls compiled functions, to run once per process and under a lock file.

    Of several processes that call it at the same time, one compiles; the others wait and load its code from disk. If
    `use` fails, the cached code may be damaged: it is deleted and `use` is called again.
    """

    @functools.cache
    @functools.wraps(use)
    def compile_once() -> None:
        UNSAVED.report()
        with _compile_lock(use):
            try:
                use()
            except Exception:
                for file in [file for folder in _cache_folders for file in folder.glob("*.nb?")]:
                    with contextlib.suppress(OSError):
                        file.unlink()
                use()

    return compile_once


def compile_in_turns(compilers: Sequence[Callable[[], None]]) -> None:
    """Call functions of `compiles`, first those no other process runs: starting replicas share the work."""
    pending = list(compilers)
    while pending:
        compiler = next((each for each in pending if not _is_compiling(each)), pending[0])
        pending.remove(compiler)
        compiler()


@contextlib.contextmanager
def _compile_lock(compiler: Callable) -> Iterator[None]:
    """Hold the lock file of a `compiles` function, if there is a cache to share with other processes."""
    with locked_if_possible(_lock_path(compiler)) if _cache_folders else contextlib.nullcontext():
        yield


def _is_compiling(compiler: Callable) -> bool:
    return bool(_cache_folders) and is_locked(_lock_path(compiler))


def _lock_path(compiler: Callable) -> Path:
    return cache_root() / f"{compiler.__module__}.{compiler.__name__}.lock"
