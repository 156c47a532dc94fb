"""Messages between a driver and its replicas. An answer has its order's number: late ones are dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, ShardError, class_and_first_line
from lp_runtime.replica.loaded_model import ReplicaInfo
from lp_runtime.request.output import Report, StepOutput
from lp_runtime.request.request import Request
from lp_runtime.utils.encoding import decode, encode

PING, PONG = "ping", "pong"  # answered by a separate thread, even during a forward pass


@dataclass(frozen=True)
class Join:
    """Order to leave any current group, and join another. Answered by Joined, GroupBroken or Refused."""

    order: int
    context: ReplicaContext  # the replica's rank, and where the group meets
    timeout: float | None = None  # seconds within which all members must join; None for launcher.timeout
    is_start: bool = True  # whether the runtime starts, so that unusable files of the settings are refused


@dataclass(frozen=True)
class Decode:
    """Order to decode a request in the current group.

    A replica that is alone in its group decodes all its Decode orders as one batch. Answered by rank 0's Streamed, then
    every member's Finished, GroupBroken or Refused.
    """

    order: int
    request: bytes  # sealed, so that a replica that cannot open it can refuse this order


@dataclass(frozen=True)
class Prefill:
    """Order to run the prefill of a request that this replica will decode later. Answered by Prefilled."""

    order: int
    request: bytes  # sealed; its prompt and committed tokens are prefilled


@dataclass(frozen=True)
class Cancel:
    """Cancel an order. A separate thread handles it, so a running order ends after its current step."""

    order: int


@dataclass(frozen=True)
class Abort:
    """Leave an order's group, even during an exchange: another member failed. Answered by GroupBroken."""

    order: int


class ModelLoaded:
    """First message of a replica: its model is loaded and checked."""


@dataclass(frozen=True)
class Joined:
    """Answer to a Join: the replica is in the group."""

    order: int
    info: ReplicaInfo  # the model, and the capacity that all replicas of the group have


@dataclass(frozen=True)
class Prefilled:
    """Answer to a Prefill, even if it failed: the Decode prefills what is missing, or refuses the request."""

    order: int


@dataclass(frozen=True)
class Streamed:
    """Rank 0's answer to a Decode after each step: the tokens that the step committed."""

    order: int
    output: StepOutput


@dataclass
class Progress:
    """Tokens that a replica has committed since it received the Decode order."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token if the request asks for them, else empty
    num_steps: int = 0  # that committed these tokens
    found_by: list[int] = field(default_factory=list)  # rank that verified each token, with a trace; else empty
    sources: list[str] = field(default_factory=list)  # origin of each token, with a trace; else empty
    cached_tokens: int = 0  # of the prompt; 0 if an earlier attempt has fed it

    def add(self, output: StepOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.num_steps += 1
        self.found_by += output.found_by or ()
        self.sources += output.sources or ()
        self.cached_tokens += output.cached_tokens

    def output_after(self, num_tokens: int, request: Request) -> StepOutput | None:
        """Return what was committed after the first `num_tokens` tokens, as a step output; None if nothing."""
        if len(self.token_ids) <= num_tokens:
            return None
        return StepOutput(
            self.token_ids[num_tokens:],
            self.logprobs[num_tokens:] if request.logprobs else None,
            self.found_by[num_tokens:] if request.trace else None,
            self.sources[num_tokens:] if request.trace else None,
            0 if num_tokens else self.cached_tokens,
        )


@dataclass(frozen=True)
class Finished:
    """Final answer to a Decode: the request has ended or was cancelled."""

    order: int
    progress: Progress
    report: Report


@dataclass(frozen=True)
class GroupBroken:
    """Final answer to a Join or Decode: this replica left the broken group. Its progress remains valid."""

    order: int
    progress: Progress
    reason: str
    digests: list[int] | None = None  # digest of each rank's state if they differ, else None
    was_present: bool = False  # at the meeting point of a Join, where other members were missing


@dataclass(frozen=True)
class Refused:
    """Final answer to a Join or Decode no replica can carry out. The replica leaves a group of several."""

    order: int
    message: str
    kind: type[LookaheadError]


class Origin(IntEnum):
    """Kind of a failure, the one that explains the others first."""

    CAUSE = 0  # an error of this process
    EXIT = 1  # the end of a process, whose reason is not known
    LOSS = 2  # another process is gone or cannot be met


@dataclass(frozen=True)
class Failed:
    """Last message of a replica: it cannot continue, and its process ends."""

    message: str
    kind: type[LookaheadError] | None = None  # class of the error if it is a LookaheadError
    origin: Origin = Origin.EXIT

    @classmethod
    def from_error(cls, error: Exception) -> Failed:
        origin = Origin.LOSS if isinstance(error, (ReplicaError, LaunchError, ShardError)) else Origin.CAUSE
        if isinstance(error, LookaheadError):
            return cls(str(error), type(error), origin)
        return cls(class_and_first_line(error), None, origin)


Order = Join | Decode | Prefill
KINDS = {kind.__name__.encode(): kind for kind in (Join, Decode, Prefill, Cancel, Abort)}


def encode_order(message: object) -> bytes:
    return PING.encode() if message == PING else type(message).__name__.encode() + b" " + encode(message)


def decode_order(data: bytes) -> object:
    """Return a message of `encode_order`; LaunchError if damaged or from another version of lp_runtime."""
    if data == PING.encode():
        return PING
    name, _, encoded = data.partition(b" ")
    try:
        if name not in KINDS:
            raise ValueError("it is not a message of this version of lp_runtime")
        return decode(KINDS[name], encoded)
    except ValueError as error:
        raise LaunchError(
            f"an order of the driver cannot be read: {error}; all machines need the same version of lp_runtime"
        ) from error


def first_cause(failures: dict[int, Failed]) -> int:
    """Return the index of the replica whose failure caused the others."""
    return min(failures, key=lambda index: failures[index].origin)
