"""The process that owns an object with threads or child processes, which a fork does not copy."""

from __future__ import annotations

import os

from lp_runtime.errors import ReplicaError


class OwnerProcess:
    """The process that has made this object."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this process is the owner; False in a process forked from it."""
        return os.getpid() == self._process_id

    def check(self, what: str) -> None:
        """Raise a ReplicaError in a forked process. Call it before taking a lock, which may have been copied locked."""
        if not self.is_current:
            raise ReplicaError(f"{what} belongs to process {self._process_id}: create it after the fork")
