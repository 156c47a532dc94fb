"""On-disk cache of measurements: named arrays in files of one folder."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import numpy as np

from lp_runtime.utils.files import locked_if_possible, write_whole

log = logging.getLogger(__name__)

T = TypeVar("T")


class CalibrationFiles:
    """Arrays stored in a folder, or nowhere without one; failures only cause a new measurement.

    `reports` is whether this process logs that the folder cannot be written; one of the replicas should.
    """

    def __init__(self, folder: str | None, reports: bool = True):
        self._reports = reports
        self._folder: Path | None = None
        if folder is not None:
            with contextlib.suppress(RuntimeError):  # "~" cannot be expanded: no home folder
                self._folder = Path(folder).expanduser()

    def load(self, name: str, keys: Sequence[str], read: Callable[[dict[str, np.ndarray]], T]) -> T | None:
        """Return what `read` makes of a file's arrays by key; None if it is missing or damaged, or `read` fails."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / name, allow_pickle=False) as saved:
                return read({key: saved[key] for key in keys})
        except (OSError, ValueError, KeyError, EOFError):
            return None
        except Exception:  # a damaged archive
            log.warning("%s is damaged and will be measured again", self._folder / name)
            return None

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Hold a file's lock, so that no other process writes it between a `load` and a `store`."""
        if self._folder is None:
            return contextlib.nullcontext()
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        return locked_if_possible(self._folder / f"{name}.lock")

    def store(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays to a file; a failure is logged, once for each folder, not raised."""
        if self._folder is None:
            return
        data = io.BytesIO()
        np.savez(data, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle, numpy's keyword
        try:
            write_whole(self._folder / name, data.getvalue())
        except OSError as error:
            if self._reports:
                _warn_unwritten(self._folder, error.strerror or str(error))


@functools.cache  # once per process
def _warn_unwritten(folder: Path, reason: str) -> None:
    log.warning("cache_dir=%s: cannot be written, so each start measures the model again: %s", folder, reason)
