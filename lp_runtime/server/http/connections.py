"""uvicorn with limits on the number of connections and on their idle time."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lp_runtime.config.serving import ServeConfig
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.http.settings import max_connections

log = logging.getLogger(__name__)

ABORT_SECONDS = 5.0  # to send errors to the clients of aborted requests
REFUSAL_SECONDS = 1.0  # for a refused client to read its answer and close


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, plus limits that uvicorn does not have.

    `turns` numbers the waits of all connections for a request. `refused` has the connections that are being refused,
    at most `max_connections`, so that both together stay below the limit of open files.
    """

    def __init__(self, app: Any, config: ServeConfig):
        super().__init__(
            app,
            http=LimitedProtocol,  # h11 is the strictest parser; uvicorn would choose httptools if it is installed
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # loop.call_later accepts floats
            timeout_graceful_shutdown=ABORT_SECONDS,  # type: ignore[arg-type]
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile or config.ssl_certfile,
        )
        self.header_timeout = config.header_timeout
        self.turns = itertools.count()
        self.refused: set[LimitedProtocol] = set()
        self.is_overload_logged = False
        self.max_connections = max_connections(config)


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
        self._settings = config
        self._head_timer: asyncio.TimerHandle | None = None
        self.turn = next(self._settings.turns)

    @property
    def is_idle(self) -> bool:
        """Whether the connection is waiting for a request, not answering one."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, within the limit.

        If there are too many, close the one that has waited longest for a further request. If there is none, refuse
        the one that has waited longest for its first request, or this one.
        """
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) <= self._settings.max_connections:
            return
        others = [each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self]
        idle = [each for each in others if each.is_idle]
        chosen = min(idle, key=lambda each: (each.cycle is None, each.turn), default=self)
        if chosen.cycle is None:
            chosen.refuse()
        else:
            chosen.close()

    def data_received(self, data: bytes) -> None:
        """Read received bytes; the first byte of a request's headers starts the header timeout."""
        if self in self._settings.refused:
            return
        super().data_received(data)
        if not self.is_idle:
            self._forget_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._expect_head()

    def on_response_complete(self) -> None:
        self.turn = next(self._settings.turns)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settings.refused.discard(self)
        self._forget_timer()
        super().connection_lost(exc)

    def close(self) -> None:
        self._forget_timer()
        self.connections.discard(self)
        self.transport.close()

    def _expect_head(self) -> None:
        self.turn = next(self._settings.turns)
        self._head_timer = self.loop.call_later(self._settings.header_timeout, self.close)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def refuse(self) -> None:
        """Answer with status 503, then discard what the client sends: closing with unread data loses the answer."""
        settings = self._settings
        message = f"too many connections: {settings.max_connections} are open; try later"
        if not settings.is_overload_logged:
            settings.is_overload_logged = True
            log.warning("%s (see max_connections and the limit of open files); this is logged once", message)
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
        self._forget_timer()
        self.connections.discard(self)
        if len(settings.refused) < settings.max_connections:
            settings.refused.add(self)
            self._head_timer = self.loop.call_later(REFUSAL_SECONDS, self.close)
        else:
            self.close()
