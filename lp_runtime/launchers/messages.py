"""What a driver and the replicas it started say to each other.

A driver's orders are numbered; every answer carries the number of its order, so that what comes late is known as late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.engine.output import Report, Run
from lp_runtime.engine.replica import ReplicaInfo
from lp_runtime.engine.request import Request
from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, first_line

PING, PONG = "ping", "pong"  # answered whatever else the replica is doing


@dataclass(frozen=True)
class Join:
    """Leave the group you are in, if any, and form another one. Answered by Joined, Broken or Refused."""

    order: int
    context: ReplicaContext


@dataclass(frozen=True)
class Decode:
    """Decode a request in the group you are in; together with others that are there, if you are alone in it. Answered
    by rank 0's Streamed, then Finished, Broken or Refused."""

    order: int
    request: Request


@dataclass(frozen=True)
class Prefill:
    """Feed a request's text to the model, so that it is there when the request is to be decoded. Answered by Prefilled."""

    order: int
    request: Request


@dataclass(frozen=True)
class Cancel:
    """End what an order has begun; acted on whatever else the replica is doing."""

    order: int


@dataclass(frozen=True)
class Loaded:
    """A replica's model is loaded and checked: the first thing that it says."""

    info: ReplicaInfo


@dataclass(frozen=True)
class Joined:
    """A replica is in the group."""

    order: int
    info: ReplicaInfo


@dataclass(frozen=True)
class Prefilled:
    """The text is there, or cannot be; whoever decodes the request will see."""

    order: int


@dataclass(frozen=True)
class Streamed:
    """What one step committed."""

    order: int
    run: Run


@dataclass(frozen=True)
class Progress:
    """What a replica has committed of a request since its order: token ids, their log-probabilities where the request
    asks for them, and in how many steps."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_steps: int = 0

    def after(self, run: Run) -> Progress:
        """The same with one step more."""
        logprobs = [*self.logprobs, *(run.logprobs or ())]
        return Progress([*self.token_ids, *run.token_ids], logprobs, self.num_steps + 1)


@dataclass(frozen=True)
class Finished:
    """A request is done."""

    order: int
    progress: Progress
    report: Report


@dataclass(frozen=True)
class Broken:
    """The group is broken, and this replica has left it; what it has committed stands.

    Attributes:
        digests: of each rank's state, where they differ.
    """

    order: int
    progress: Progress
    reason: str
    digests: list[int] | None = None


@dataclass(frozen=True)
class Refused:
    """The order cannot be carried out, by this replica or any other: the request or a setting is at fault. The replica
    has left its group, unless it is alone in it. `kind` is the class of the error."""

    order: int
    message: str
    kind: type[LookaheadError]


@dataclass(frozen=True)
class Failed:
    """A replica cannot go on, and ends. `kind` is the class of a LookaheadError, or None for anything unforeseen."""

    message: str
    kind: type[LookaheadError] | None

    @classmethod
    def from_error(cls, error: Exception) -> Failed:
        if isinstance(error, LookaheadError):
            return cls(str(error), type(error))
        return cls(f"{type(error).__name__}: {first_line(error)}", None)


def first_cause(failures: dict[int, Failed]) -> int:
    """Of several replicas' failures, the one that explains the others: a lost peer or group is a consequence."""
    consequences = (ReplicaError, LaunchError)

    def is_consequence(index: int) -> bool:
        kind = failures[index].kind
        return kind is not None and issubclass(kind, consequences)

    return min(failures, key=is_consequence)
