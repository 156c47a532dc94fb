"""Atomic file writes, locks between processes, and files of ASCII text."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import glob
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp"  # suffix of files that are being written
MAX_WRITE_SECONDS = 3600.0  # of a large file on a slow disk


def read_ascii(path: str) -> str:
    """Return the text of a file, without the mark that Windows editors write before it; UnicodeError if not ASCII."""
    return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).decode("ascii")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, created if necessary; other processes wait. Raises OSError if it cannot be opened."""
    with _opened_lock(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def locked_if_possible(path: Path) -> Iterator[None]:
    """Hold a lock file as `locked` does; nothing is held where it cannot be, as in a folder that cannot be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(locked(path))
        yield


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock file; False if it cannot be opened."""
    try:
        with _opened_lock(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _opened_lock(path: Path) -> IO[str]:
    try:
        return open(path, "a+")  # on NFS a shared lock needs a file that can be read, an exclusive one one to write
    except PermissionError:
        return open(path)  # another user's, who may have left nothing to write here


def write_whole(path: Path, data: bytes, is_private: bool = False) -> None:
    """Write a file atomically: complete or unchanged if the process dies. Creates missing parent folders.

    Its mode is that of the umask, or with `is_private` 0600. A symbolic link stays one: the file that it names is
    written. Deletes what processes left that died while they wrote this file.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if is_private else 0o666
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _delete_left_files(path)


def _delete_left_files(path: Path) -> None:
    """Delete temporary files of a path that no living process can still be writing."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - MAX_WRITE_SECONDS:
                left.unlink()
