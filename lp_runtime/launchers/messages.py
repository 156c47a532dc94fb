"""What a driver and the replicas it started say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, first_line
from lp_runtime.worker import ReplicaInfo


@dataclass(frozen=True)
class Ready:
    """A replica is loaded, checked and connected."""

    info: ReplicaInfo


@dataclass(frozen=True)
class Failed:
    """A replica cannot go on. `kind` is the class of a LookaheadError, or None for anything unforeseen."""

    rank: int
    message: str
    kind: type[LookaheadError] | None

    @classmethod
    def from_error(cls, rank: int, error: Exception) -> Failed:
        if isinstance(error, LookaheadError):
            return cls(rank, str(error), type(error))
        return cls(rank, f"{type(error).__name__}: {first_line(error)}", None)


@dataclass(frozen=True)
class Finished:
    """A replica that does not stream has finished its request."""


def first_cause(failures: list[Failed]) -> Failed:
    """Of several failures, the one that explains the others: a lost peer or group is a consequence."""
    consequences = (ReplicaError, LaunchError)
    return min(failures, key=lambda failed: failed.kind is not None and issubclass(failed.kind, consequences))
