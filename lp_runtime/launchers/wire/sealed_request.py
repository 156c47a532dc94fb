"""A request on its way to replicas: encoded by fields, with the caller's logits processors pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lp_runtime.errors import RequestError, class_and_first_line, first_line
from lp_runtime.request.request import Request
from lp_runtime.utils.encoding import decode, encode


@dataclass(frozen=True)
class SealedRequest:
    """Contents of a request's message."""

    request: Request  # without its logits processors
    processors: tuple[tuple[str, bytes], ...]  # class name and pickle of each one; the only pickles of a request


def seal(request: Request, pickled: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """Return a request's message; `pickled` pickles a logits processor for the replicas' `pickle.loads`."""
    processors = tuple((_class_of(each), pickled(each)) for each in request.processors)
    try:
        return encode(SealedRequest(replace(request, processors=()), processors))
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent to replicas: {first_line(error)}") from error


def open_request(data: bytes) -> Request:
    try:
        sealed = decode(SealedRequest, data)
    except ValueError as error:
        raise RequestError(
            f"the request cannot be read: {first_line(error)}; all machines need the same version of lp_runtime"
        ) from error
    return replace(sealed.request, processors=tuple(_unpickled(each, name) for name, each in sealed.processors))


def _class_of(processor: object) -> str:
    """Return the module and name of a processor's class, or of a processor that is a function."""
    named = processor if hasattr(processor, "__qualname__") else type(processor)
    return f"{named.__module__}.{named.__qualname__}"


def _unpickled(data: bytes, name: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # the caller's classes and modules may raise anything
        raise RequestError(
            f"processors: {name}: replicas cannot import it ({class_and_first_line(error)});"
            " define it in a module that they can import"
        ) from error
