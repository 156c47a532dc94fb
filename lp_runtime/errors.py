"""The errors that users meet. Each message is one line that names the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LookaheadError(Exception):
    """Base of the errors below."""


class RequestError(LookaheadError, ValueError):
    """A request that cannot be served as given: empty prompt, unknown token id, prompt too long."""


class ConfigError(LookaheadError, ValueError):
    """A setting that is unknown, out of range or contradicts another."""


class ModelError(LookaheadError):
    """A model that cannot be loaded, or that fails the start-up self-check."""


class LaunchError(LookaheadError):
    """Replicas that cannot be started."""


class ReplicaError(LookaheadError):
    """A replica that failed or was lost while it worked."""


class BusyError(LookaheadError):
    """A request that is refused because too many are waiting."""


class DeadlineError(LookaheadError):
    """A request that has not begun in the time that it was given."""


class StateMismatchError(ReplicaError):
    """Replicas whose decoding states have parted, as their digests show.

    Args:
        digests: of each rank.
    """

    def __init__(self, digests: list[int]):
        self.digests = digests
        shown = ", ".join(f"rank {rank} {value:#x}" for rank, value in enumerate(digests))
        super().__init__(f"the replicas' states have parted, their digests differ: {shown}")

    def __reduce__(self):
        return StateMismatchError, (self.digests,)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def unforeseen_as(kind: type[LookaheadError], what: str) -> Iterator[None]:
    """Turn any exception that is not a LookaheadError into `kind`, in one line that begins with `what`."""
    try:
        yield
    except LookaheadError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {first_line(error)}") from error
