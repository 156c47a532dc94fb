"""The file in which what drafting has seen outlives a runtime: read at start, written after every request."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from lp_runtime.config import LookaheadConfig
from lp_runtime.errors import ConfigError
from lp_runtime.files import write_whole
from lp_runtime.lookahead.drafts import Memory
from lp_runtime.parallel.exchange import broadcast_object

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryFile:
    """Where a memory is kept. Only the first replica reads and writes it.

    Attributes:
        path: of the file.
        num_bytes: of the memory.
        vocabulary_size: of the model.
    """

    path: Path
    num_bytes: int
    vocabulary_size: int

    @classmethod
    def of(cls, settings: LookaheadConfig, vocabulary_size: int) -> MemoryFile | None:
        """The file that the settings name, if they do.

        Raises:
            ConfigError: if it begins with the home folder of a user that there is not.
        """
        if settings.memory in ("request", "runtime"):
            return None
        try:
            path = Path(settings.memory).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"lookahead.memory={settings.memory}: {error}") from error
        return cls(path, settings.memory_bytes, vocabulary_size)

    def load(self, rank: int, num_replicas: int, device: torch.device) -> Memory:
        """The memory, the same on all replicas; an empty one if there is no file yet.

        Raises:
            ConfigError: if the file is not one, or of another size or version, or cannot be written.
        """
        data: bytes | ConfigError | None = None
        if rank == 0:
            try:
                data = self._read()
            except ConfigError as error:
                data = error
        data = broadcast_object(data, rank, num_replicas, device)
        if isinstance(data, ConfigError):
            raise data
        return Memory(self.num_bytes) if data is None else Memory.load(data, self.num_bytes, self.vocabulary_size)

    def _read(self) -> bytes | None:
        try:
            if self.path.exists():
                data = self.path.read_bytes()
                Memory.load(data, self.num_bytes, self.vocabulary_size)
                return data
            write_whole(
                self.path, Memory(self.num_bytes).dump(self.vocabulary_size)
            )  # so that it is known now whether it can be
            return None
        except OSError as error:
            raise ConfigError(
                f"lookahead.memory={self.path}: cannot be kept there ({error.strerror or error})"
            ) from error
        except ValueError as error:
            raise ConfigError(f"lookahead.memory={self.path}: {error}; give another path, or delete it") from error

    def save(self, memory: Memory) -> None:
        """Write the memory. That it cannot be written is logged: the request is done."""
        try:
            write_whole(self.path, memory.dump(self.vocabulary_size))
        except OSError as error:
            log.warning("lookahead.memory=%s: %s", self.path, error.strerror or error)
