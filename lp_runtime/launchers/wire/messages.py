"""What a driver and the replicas it started say to each other.

A driver's orders are numbered. Every answer carries the number of its order, so that a late answer is known as late.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, RequestError, first_line
from lp_runtime.replica.replica import ReplicaInfo
from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.request import Request

PING, PONG = "ping", "pong"  # answered whatever else the replica is doing


@dataclass(frozen=True)
class SealedRequest:
    """A request on its way to a replica, pickled apart from its order: a replica that cannot import a class of the
    caller's can still read the order, and refuse it.

    Attributes:
        data: the pickled request, without its logits processors.
        processors: (class, pickled processor) of each of its logits processors.
    """

    data: bytes
    processors: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(cls, request: Request, pickled: Callable[[object], bytes] = pickle.dumps) -> SealedRequest:
        """Return a request, sealed.

        Args:
            request: the request.
            pickled: returns a value as bytes that the replica's `pickle.loads` reads.
        """
        processors = tuple((_class_of(each), pickled(each)) for each in request.processors)
        return cls(pickled(replace(request, processors=())), processors)

    def opened(self) -> Request:
        """Return the request.

        Raises:
            RequestError: if this process cannot unpickle it; names the processor that is at fault.
        """
        request = _unpickled(self.data, "the request")
        processors = tuple(_unpickled(data, f"processors: {name}") for name, data in self.processors)
        return replace(request, processors=processors)


def _class_of(processor: object) -> str:
    """Return the name of a processor's class, or of a function, with its module."""
    named = processor if hasattr(processor, "__qualname__") else type(processor)
    return f"{named.__module__}.{named.__qualname__}"


def _unpickled(data: bytes, what: str) -> Any:
    """Return what was pickled.

    Raises:
        RequestError: if it cannot be unpickled; begins with `what`.
    """
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever a foreign class or module raises
        raise RequestError(
            f"{what}: replicas cannot import it ({type(error).__name__}: {first_line(error)});"
            " define it in a module that they can import"
        ) from error


@dataclass(frozen=True)
class Join:
    """Order to leave the present group, if any, and form another one. Answered by Joined, GroupBroken or Refused.

    Attributes:
        order: number of this order.
        context: the replica's rank and where the group meets.
    """

    order: int
    context: ReplicaContext


@dataclass(frozen=True)
class Decode:
    """Order to decode a request in the present group; a replica that is alone in its group decodes all it has been
    ordered as one batch. Answered by rank 0's Streamed, then every member's Finished, GroupBroken or Refused.

    Attributes:
        order: number of this order.
        request: what to decode.
    """

    order: int
    request: SealedRequest


@dataclass(frozen=True)
class Prefill:
    """Order to run the prefill of a request that is to be decoded here later. Answered by Prefilled.

    Attributes:
        order: number of this order.
        request: its prompt and committed tokens are fed to the model.
    """

    order: int
    request: SealedRequest


@dataclass(frozen=True)
class Cancel:
    """End what an order has begun; acted on whatever else the replica is doing.

    Attributes:
        order: number of the order to end.
    """

    order: int


@dataclass(frozen=True)
class Abort:
    """Leave the group that an order is carried out in, because a member is lost; acted on whatever else the replica is
    doing. The order is answered by GroupBroken.

    Attributes:
        order: number of the order.
    """

    order: int


@dataclass(frozen=True)
class ModelLoaded:
    """A replica's model is loaded and checked: the first message of every replica.

    Attributes:
        info: the model.
    """

    info: ReplicaInfo


@dataclass(frozen=True)
class Joined:
    """A replica is in the group.

    Attributes:
        order: number of the Join.
        info: the model, and the capacity that all replicas of the group have.
    """

    order: int
    info: ReplicaInfo


@dataclass(frozen=True)
class Prefilled:
    """A prefill has ended: completed, cancelled, or of a request that the replica cannot read; decoding feeds whatever
    is missing, or refuses the request.

    Attributes:
        order: number of the Prefill.
    """

    order: int


@dataclass(frozen=True)
class Streamed:
    """What one step committed.

    Attributes:
        order: number of the Decode.
        output: the committed tokens.
    """

    order: int
    output: StepOutput


@dataclass(frozen=True)
class Progress:
    """What a replica has committed of a request since its order.

    Attributes:
        token_ids: committed token ids.
        logprobs: their log-probabilities, where the request asks for them; else empty.
        num_steps: steps that these tokens took.
        found_by: rank of the replica that has verified each, where the request asks for a trace; else empty.
        sources: where each came from, where the request asks for a trace; else empty.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_steps: int = 0
    found_by: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def after(self, output: StepOutput) -> Progress:
        """Return the progress after one step more."""
        return Progress(
            [*self.token_ids, *output.token_ids],
            [*self.logprobs, *(output.logprobs or ())],
            self.num_steps + 1,
            [*self.found_by, *(output.found_by or ())],
            [*self.sources, *(output.sources or ())],
        )

    def output_behind(self, num_tokens: int, request: Request) -> StepOutput | None:
        """Return what was committed behind the first `num_tokens` tokens, as the request wants to be told; None if that
        is nothing."""
        if len(self.token_ids) <= num_tokens:
            return None
        return StepOutput(
            self.token_ids[num_tokens:],
            self.logprobs[num_tokens:] if request.logprobs else None,
            self.found_by[num_tokens:] if request.trace else None,
            self.sources[num_tokens:] if request.trace else None,
        )


@dataclass(frozen=True)
class Finished:
    """A request is done.

    Attributes:
        order: number of the Decode.
        progress: what this replica has committed of the request.
        report: what the request took.
    """

    order: int
    progress: Progress
    report: Report


@dataclass(frozen=True)
class GroupBroken:
    """The group is broken, and this replica has left it; what it has committed stands.

    Attributes:
        order: number of the Join or Decode.
        progress: what this replica has committed of the request.
        reason: the error's message.
        digests: of each rank's state, where they differ; else None.
    """

    order: int
    progress: Progress
    reason: str
    digests: list[int] | None = None


@dataclass(frozen=True)
class Refused:
    """The order cannot be carried out, by this replica or any other: the request or a setting is at fault. The replica
    has left its group, unless it is alone in it.

    Attributes:
        order: number of the Join or Decode.
        message: the error's message.
        kind: class of the error.
    """

    order: int
    message: str
    kind: type[LookaheadError]


@dataclass(frozen=True)
class Failed:
    """A replica cannot go on, and ends.

    Attributes:
        message: the error's message.
        kind: class of the error if it is a LookaheadError; None for anything unforeseen.
    """

    message: str
    kind: type[LookaheadError] | None

    @classmethod
    def from_error(cls, error: Exception) -> Failed:
        """Return the message that reports `error`."""
        if isinstance(error, LookaheadError):
            return cls(str(error), type(error))
        return cls(f"{type(error).__name__}: {first_line(error)}", None)


Order = Join | Decode | Prefill


def first_cause(failures: dict[int, Failed]) -> int:
    """Return the replica whose failure explains those of the others: a lost peer or group is a consequence.

    Args:
        failures: by replica index, at least one.
    """
    consequences = (ReplicaError, LaunchError)

    def is_consequence(index: int) -> bool:
        kind = failures[index].kind
        return kind is not None and issubclass(kind, consequences)

    return min(failures, key=is_consequence)
