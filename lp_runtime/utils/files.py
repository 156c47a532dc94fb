"""Atomic file writes, locks between processes, and files of ASCII text."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def read_ascii(path: str) -> str:
    """Return the text of a file, without the mark that Windows editors write before it; UnicodeError if not ASCII."""
    return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).decode("ascii")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, created if necessary; other processes wait. Raises OSError if it cannot be opened."""
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock file; False if it cannot be opened."""
    try:
        with open(path, "a+") as lock:  # on NFS a shared lock needs a file that can be read
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: complete or unchanged if the process dies. Creates missing parent folders.

    A symbolic link stays one: the file that it names is written.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
