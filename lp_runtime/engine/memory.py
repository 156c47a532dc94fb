"""The errors that end a request when memory runs out, after freeing what can be freed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import LookaheadError, ReplicaError, RequestMemoryError
from lp_runtime.model.capacity import free_bytes
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

log = logging.getLogger(__name__)


def memory_error(model: ModelRunner, request: Request, new_tokens: Sequence[int], reason: str) -> RequestMemoryError:
    """Free what no running request needs, and return the error that ends a request for lack of memory.

    The replica must report the error in the next exchange, so that all replicas end the request with it.
    """
    model.free_memory()
    free = free_bytes(model.device)
    error = RequestMemoryError(
        f"not enough memory on {model.device} for this request: a prompt of {len(request.prompt_ids)} tokens and"
        f" {len(new_tokens)} new ones, with {'an unknown size' if free is None else f'{free / (1 << 30):.1f} GiB'} free"
    )
    log.warning("request %s: %s (%s)", request.request_id or "without an id", error, reason)
    return error


def unshared_error(model: ModelRunner, request: Request, group: Group, reason: str) -> LookaheadError:
    """Return the error if memory ran out where peers expect none: with several replicas, the group's."""
    model.synchronize()
    if group.is_alone:
        return memory_error(model, request, request.committed, reason)
    model.free_memory()
    return ReplicaError(f"rank {group.rank} ran out of memory between two passes: {reason}")
