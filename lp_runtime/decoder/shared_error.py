"""An error of a request that one replica alone has met, made known to all: they end the request in step, alike."""

from __future__ import annotations

import pickle

import numpy as np

from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import LookaheadError

WORD_BYTES = 8  # of an exchanged integer


def shared_error(error: LookaheadError | None, group: Group) -> LookaheadError:
    """Return the error of the first replica that has one, on every replica of a group: once a request, at its end.

    Args:
        error: this replica's; None on replicas that have met none. At least one replica has one.
        group: the replicas of the request; all of them must call this at the same place.

    Raises:
        ReplicaError: if a peer is gone.
    """
    if group.is_alone:
        assert error is not None
        return error
    data = b"" if error is None else pickle.dumps((_own_kind(error), str(error)))
    sizes = gather_rows(np.array([len(data)], np.int64), group)[:, 0]
    padded = data.ljust(-(-int(sizes.max()) // WORD_BYTES) * WORD_BYTES, b"\0")
    rows = gather_rows(np.frombuffer(padded, np.int64).copy(), group)
    first = int(np.flatnonzero(sizes)[0])
    kind, message = pickle.loads(rows[first].tobytes()[: sizes[first]])
    return kind(message)


def _own_kind(error: LookaheadError) -> type[LookaheadError]:
    """Return the first class of an error that every replica knows: a caller's processor may raise one of its own."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == LookaheadError.__module__)
