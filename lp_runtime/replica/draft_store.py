"""File in which draft tables outlive a runtime: read at start, written after each request of scope ""."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lp_runtime.config.checks import home_path
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.exchange import broadcast_object
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ConfigError
from lp_runtime.lookahead.drafters.best_first.draft_tables import DraftTables, stored_stamp
from lp_runtime.utils.files import locked_if_possible, write_whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftStore:
    """The file of a runtime's draft tables, read and written by rank 0 only. `num_bytes` is their size."""

    path: Path
    num_bytes: int
    vocabulary_size: int

    @classmethod
    def of(cls, settings: LookaheadConfig, vocabulary_size: int) -> DraftStore | None:
        """Return the store that the settings name; None if they name no file."""
        if settings.draft_tables in ("auto", "request", "runtime"):
            return None
        path = home_path("lookahead.draft_tables", settings.draft_tables)
        return cls(Path(path), settings.draft_tables_bytes, vocabulary_size)

    def load(self, group: Group, is_start: bool = True) -> DraftTables:
        """Return the stored draft tables, equal on all replicas; empty ones if the file does not exist.

        A file that cannot be read, created or used raises a ConfigError on all replicas at the start; in later groups
        they begin with empty tables instead.
        """
        data: bytes | ConfigError | None = None
        if group.rank == 0:
            try:
                data = self._read()
            except ConfigError as error:
                data = error
        data = broadcast_object(data, group)
        if isinstance(data, ConfigError):
            if is_start:
                raise data
            log.warning("%s; beginning with empty draft tables", data)
            data = None
        if data is None:
            return DraftTables(self.num_bytes)
        return DraftTables.load(data, self.num_bytes, self.vocabulary_size)

    def _read(self) -> bytes | None:
        try:
            if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
                raise ConfigError(f"lookahead.draft_tables={self.path}: is a pipe or a device; give a file")
            with self._locked():
                if self.path.exists():
                    data = self.path.read_bytes()
                    DraftTables.load(data, self.num_bytes, self.vocabulary_size)
                    return data
                # Create the file now, so that a path that is not writable is refused at start.
                write_whole(self.path, DraftTables(self.num_bytes).dump(self.vocabulary_size), is_private=True)
                return None
        except OSError as error:
            raise ConfigError(
                f"lookahead.draft_tables={self.path}: cannot be read or written ({error.strerror or error})"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"lookahead.draft_tables={self.path}: {error}; give another path, or delete it"
            ) from error

    def save(self, draft_tables: DraftTables) -> None:
        """Write the draft tables, unless the file holds some that have learned more, of a request at the same time.

        A failure is logged, not raised, since the request has succeeded.
        """
        with self._locked():
            if stored_stamp(self.path) > draft_tables.stamp:
                return
            try:
                write_whole(self.path, draft_tables.dump(self.vocabulary_size), is_private=True)
            except OSError as error:
                log.warning("lookahead.draft_tables=%s: %s", self.path, error.strerror or error)

    def _locked(self) -> AbstractContextManager[None]:
        """Hold the lock next to the file, so that no other process writes between a look at the file and a write."""
        file = Path(os.path.realpath(self.path))
        return locked_if_possible(file.with_name(f"{file.name}.lock"))
