"""Errors that users meet. Each message is one line that names the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LookaheadError(Exception):
    """Base of all errors of this package."""


class RequestError(LookaheadError, ValueError):
    """A request that cannot be served as given: empty prompt, unknown token id, prompt too long."""


class LengthError(RequestError):
    """A request whose prompt and new tokens exceed the model's context or a replica's cache."""


class RequestMemoryError(RequestError):
    """A request for which a replica's memory did not suffice."""


class ConfigError(LookaheadError, ValueError):
    """A setting that is unknown, out of range, or contradicts another."""


class ConstraintError(RequestError):
    """A constraint that is invalid, that no text can satisfy, that is too large or too slow to compile."""


class ModelError(LookaheadError):
    """A model that cannot be loaded, or that fails the start-up self-check."""


class LaunchError(LookaheadError):
    """Replicas that cannot be started."""


class ReplicaError(LookaheadError):
    """A replica that failed or was lost while it decoded, or a request that ended with it."""


class BusyError(LookaheadError):
    """A request that is refused because too many requests are waiting."""


class DeadlineError(LookaheadError):
    """A request that waited past its time limit without having begun."""


class StateMismatchError(ReplicaError):
    """Replicas whose decoding states differ, as their digests show.

    Attributes:
        digests: digest of each rank's state, by rank.
    """

    def __init__(self, digests: list[int]):
        self.digests = digests
        shown = ", ".join(f"rank {rank} {value:#x}" for rank, value in enumerate(digests))
        super().__init__(f"the replicas' decoding states differ, by their digests: {shown}")

    def __reduce__(self) -> tuple[type[StateMismatchError], tuple[list[int]]]:
        return StateMismatchError, (self.digests,)


class ShardError(Exception):
    """A replica that has lost one of its shards. Its processes end, and it is started again whole."""

    # No LookaheadError, whose handlers it must pass through: it is no request's and no setting's fault.


class PassFailedError(Exception):
    """A forward pass that failed on another shard of the replica. This shard left it, and awaits the next."""

    def __init__(self, num_calls: list[int]):
        self.num_calls = num_calls  # by shard, all-reduces and all-gathers that it had begun
        super().__init__("a forward pass has failed on another shard")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the next if the first announces it by a colon.

    The name of its class is added if the message is empty, or only a key.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"{type(error).__name__}: {lines[0]}"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def class_and_first_line(error: BaseException) -> str:
    """Return the name of an error's class and its first line."""
    line, name = first_line(error), type(error).__name__
    return line if line.startswith(name) else f"{name}: {line}"


def as_known_kind(error: LookaheadError) -> LookaheadError:
    """Return an error of its nearest class in this module: other processes may not know a caller's subclass."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)(str(error))


@contextmanager
def unforeseen_as(kind: type[LookaheadError], what: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn any exception of the block, except LookaheadErrors and those in `passing`, into a `kind`.

    Its message is one line that begins with `what`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (LookaheadError, *passing)):
            raise
        raise kind(f"{what}: {class_and_first_line(error)}") from error
