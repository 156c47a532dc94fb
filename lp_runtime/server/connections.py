"""The HTTP server under the routes: bounds on slow, idle and too many connections, and an end that clients hear of."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import resource
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lp_runtime.errors import ReplicaError
from lp_runtime.server.errors import ApiError

if TYPE_CHECKING:
    from lp_runtime.server.app import Server

ABORT_SECONDS = 5.0  # for the errors of requests that were ended to reach their clients
MIN_CONNECTIONS = 8  # whatever the limit of open files
BACKLOG = 2048  # connections that the system holds until this process accepts them


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the HTTP server; durations are in seconds.

    Attributes:
        header_timeout: within which the head of a request must have come, from the connection's or its first byte's
            arrival.
        keep_alive_timeout: for which a connection stays open between two requests.
        max_connections: open connections at most; half of the process's limit of open files if that is less.
        shutdown_timeout: for which running requests may go on after SIGINT or SIGTERM.
        certificate: (certificate file, key file) of TLS, in PEM; None for plain HTTP.
    """

    header_timeout: float = 10.0
    keep_alive_timeout: float = 15.0
    max_connections: int = 1024
    shutdown_timeout: float = 5.0
    certificate: tuple[str, str] | None = None


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, and the bounds that uvicorn does not have.

    Args:
        app: the ASGI application.
        limits: the bounds.

    Attributes:
        limits: see Args.
        max_connections: open connections at most.
        turns: numbers the times that a connection begins to wait for a request.
    """

    def __init__(self, app: Any, limits: HttpLimits):
        certificate, key = limits.certificate or (None, None)
        super().__init__(
            app,
            http=LimitedProtocol,  # on h11, the strictest parser, whatever others are installed
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]  # it is handed to loop.call_later
            timeout_graceful_shutdown=limits.shutdown_timeout + ABORT_SECONDS,  # type: ignore[arg-type]
            server_header=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self.limits = limits
        self.turns = itertools.count()
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_connections = limits.max_connections
        if max_files != resource.RLIM_INFINITY:
            self.max_connections = min(limits.max_connections, max(MIN_CONNECTIONS, max_files // 2))


class LimitedProtocol(H11Protocol):
    """One connection, which ends if it is silent for too long or if there are too many.

    Args:
        config: settings of the server, a LimitedConfig.
        server_state: what all connections share.
        app_state: state of the application.
        _loop: the event loop.

    Attributes:
        turn: how many times any connection had begun to wait for a request when this one did last.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, LimitedConfig)
        self._limits, self._max_connections, self._turns = config.limits, config.max_connections, config.turns
        self._head_timer: asyncio.TimerHandle | None = None
        self.turn = next(self._turns)

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. Where there are too many, close the one that has waited longest for a request, or, if
        all are being answered, refuse this one with status 503."""
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) <= self._max_connections:
            return
        others = [each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self]
        idle = [each for each in others if each.is_idle]
        if idle:
            min(idle, key=lambda each: each.turn).close()
        else:
            self._refuse()

    def data_received(self, data: bytes) -> None:
        """Read what has come; from the first byte of a request's head on, the rest has limited time."""
        super().data_received(data)
        if not self.is_idle:
            self._forget_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._expect_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request of the connection."""
        self.turn = next(self._turns)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._forget_timer()
        super().connection_lost(exc)

    def close(self) -> None:
        """Close the connection, which waits for a request."""
        self._forget_timer()
        self.connections.discard(self)
        self.transport.close()

    def _expect_head(self) -> None:
        self.turn = next(self._turns)
        self._head_timer = self.loop.call_later(self._limits.header_timeout, self.close)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        error = ApiError(503, f"too many connections: {self._max_connections} are open; try later", "server_error")
        body = json.dumps(error.body).encode()
        head = [
            b"HTTP/1.1 503 Service Unavailable",
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            b"Retry-After: 1",
            b"Connection: close",
        ]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.close()


class HttpServer(uvicorn.Server):
    """Serves the routes until SIGINT or SIGTERM, lets answers go on for a while, and ends the rest with an error.

    Args:
        server: has the routes.
        limits: bounds of the server.
    """

    def __init__(self, server: Server, limits: HttpLimits):
        super().__init__(LimitedConfig(server.app(), limits))
        self._server, self._limits = server, limits

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new request; after `shutdown_timeout` end those that run, so that each client has an error to read.

        Args:
            sockets: what the server listens on.
        """
        self._server.drain()
        error = ReplicaError("the server is shutting down")
        timer = asyncio.get_running_loop().call_later(self._limits.shutdown_timeout, self._server.abort, error)
        # What uvicorn would log as an error is this server's way to end.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
