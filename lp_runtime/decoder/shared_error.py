"""Exchange of an error that only some replicas met, so that all end the request with the same one."""

from __future__ import annotations

import pickle

import numpy as np

from lp_runtime.distributed.exchange import gather_rows
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import LookaheadError, as_known_kind

WORD_BYTES = 8  # of an exchanged integer


def shared_error(error: LookaheadError | None, group: Group) -> LookaheadError:
    """Return the error of the lowest rank that has one, on every replica of a group.

    `error` is None on replicas without an error; at least one must have one. All replicas must call this in the same
    step, at most once per request, at its end.
    """
    if group.is_alone:
        assert error is not None
        return error
    data = b"" if error is None else pickle.dumps(as_known_kind(error))
    sizes = gather_rows(np.array([len(data)], np.int64), group)[:, 0]
    padded = data.ljust(-(-int(sizes.max()) // WORD_BYTES) * WORD_BYTES, b"\0")
    rows = gather_rows(np.frombuffer(padded, np.int64).copy(), group)
    first = int(np.flatnonzero(sizes)[0])
    shared: LookaheadError = pickle.loads(rows[first].tobytes()[: sizes[first]])
    return shared
