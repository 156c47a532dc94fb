"""uvicorn with limits on connections and their idle time, and a shutdown that every client hears of."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import resource
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lp_runtime.errors import ReplicaError
from lp_runtime.server.errors import ApiError

if TYPE_CHECKING:
    from lp_runtime.server.app import Server

ABORT_SECONDS = 5.0  # to send errors to the clients of aborted requests
POLL_SECONDS = 0.05  # between looks whether running answers have ended
MIN_CONNECTIONS = 8  # allowed even if the limit of open files is tiny


@dataclass(frozen=True)
class HttpLimits:
    """Limits of the HTTP server; durations are in seconds.

    Attributes:
        header_timeout: time for a request's headers to arrive, from the opening of the connection or, on a kept-alive
            one, from the first byte of the next request.
        keep_alive_timeout: time that a connection stays open between two requests.
        max_connections: open connections at most, and at most half of the process's limit of open files.
        shutdown_timeout: time that running requests have to finish after SIGINT or SIGTERM.
        certificate: (certificate file, key file) for TLS, in PEM; None for plain HTTP.
    """

    header_timeout: float = 10.0
    keep_alive_timeout: float = 15.0
    max_connections: int = 1024
    shutdown_timeout: float = 5.0
    certificate: tuple[str, str] | None = None


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, plus limits that uvicorn does not have.

    `turns` numbers each time a connection starts to wait for a request.
    """

    def __init__(self, app: Any, limits: HttpLimits):
        certificate, key = limits.certificate or (None, None)
        super().__init__(
            app,
            http=LimitedProtocol,  # h11 is the strictest parser; uvicorn would choose httptools if it is installed
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]  # loop.call_later accepts floats
            timeout_graceful_shutdown=ABORT_SECONDS,  # type: ignore[arg-type]
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
    """One connection; it is closed if it is silent for too long, or if there are too many.

    `turn` numbers its latest wait for a request: the idle connection with the lowest one has waited longest.
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
        self._limits = config.limits
        self._max_connections = config.max_connections
        self._turns = config.turns
        self._head_timer: asyncio.TimerHandle | None = None
        self.turn = next(self._turns)

    @property
    def is_idle(self) -> bool:
        """Whether the connection is waiting for a request, not answering one."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, within the limit.

        If there are too many, close the one that has waited longest for a request; if all others are being answered,
        refuse this one with status 503.
        """
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
        """Read received bytes; the first byte of a request's headers starts the header timeout."""
        super().data_received(data)
        if not self.is_idle:
            self._forget_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._expect_head()

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        self.turn = next(self._turns)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the header timeout of a lost connection."""
        self._forget_timer()
        super().connection_lost(exc)

    def close(self) -> None:
        """Close this idle connection."""
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
        message = f"too many connections: {self._max_connections} are open; try later"
        # The path is not known yet: the body is an error of both APIs.
        body = json.dumps({**ApiError(503, message, "overloaded_error").body, "type": "error"}).encode()
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
    """Server of the routes until SIGINT or SIGTERM, or until all replicas are lost for good.

    Running answers then get `shutdown_timeout` to finish.
    """

    def __init__(self, server: Server, limits: HttpLimits):
        super().__init__(LimitedConfig(server.app(), limits))
        self._server, self._limits = server, limits

    async def on_tick(self, counter: int) -> bool:
        """Whether the server shall end; called ten times a second."""
        return await super().on_tick(counter) or not self._server.has_replicas

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests with status 503, and close the port when running answers have ended.

        After `shutdown_timeout` they are ended, and clients receive an error.
        """
        self._server.drain()
        await self._wait_for_answers()
        self._server.abort(ReplicaError("the server is shutting down"))
        # uvicorn would log tasks that exceed its graceful shutdown as errors; here they are expected.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)

    async def _wait_for_answers(self) -> None:
        """Wait until the requests of now are answered or their clients have gone; at most `shutdown_timeout`."""
        connections = [each for each in self.server_state.connections if isinstance(each, LimitedProtocol)]
        cycles = [each.cycle for each in connections if not each.is_idle]
        deadline = time.monotonic() + self._limits.shutdown_timeout
        while time.monotonic() < deadline and not self.force_exit:
            if all(each.response_complete or each.disconnected for each in cycles):
                break
            await asyncio.sleep(POLL_SECONDS)
