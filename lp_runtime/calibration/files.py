"""Files of what was measured: arrays by name, in one folder."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lp_runtime.utils.files import write_whole

log = logging.getLogger(__name__)


class CalibrationFiles:
    """Keeps arrays in files, as far as the folder allows it: what cannot be kept is measured again.

    Args:
        folder: where files are kept; None to keep nothing.
    """

    def __init__(self, folder: str | None):
        self._folder: Path | None = None
        if folder is not None:
            with contextlib.suppress(RuntimeError):  # there is no home folder
                self._folder = Path(folder).expanduser()

    def load(self, name: str, keys: Sequence[str]) -> dict[str, np.ndarray] | None:
        """Return the arrays of a file by key; None if there is no such file, or a damaged one."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / name, allow_pickle=False) as saved:
                return {key: saved[key] for key in keys}
        except (OSError, ValueError, KeyError, EOFError):
            return None
        except Exception:  # a damaged archive
            log.warning("%s is damaged and will be made again", self._folder / name)
            return None

    def store(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays to a file. A failure is logged, not raised."""
        if self._folder is None:
            return
        data = io.BytesIO()
        np.savez_compressed(data, **arrays)  # type: ignore[arg-type]  # numpy's own allow_pickle is not among them
        try:
            write_whole(self._folder / name, data.getvalue())
        except OSError as error:
            log.warning("%s cannot be kept: %s", self._folder / name, error.strerror or error)
