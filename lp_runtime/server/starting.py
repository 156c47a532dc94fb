"""The port of a server whose model is still being loaded: it is open from the first second, and says so."""

from __future__ import annotations

import socket
import threading

import uvicorn
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lp_runtime.server.connections import HttpLimits, LimitedConfig
from lp_runtime.server.errors import ApiError


class StartingServer:
    """Answers in a thread of its own until the server is there: /live with status 200, everything else with 503.

    Args:
        listener: listens; stays open.
        limits: bounds on connections.

    Attributes:
        port: what the listener listens on.
    """

    def __init__(self, listener: socket.socket, limits: HttpLimits):
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(LimitedConfig(answer, limits))
        # Its end closes what it was given; connections that come meanwhile wait in the queue that both have.
        sockets = {"sockets": [listener.dup()]}
        self._thread = threading.Thread(target=self._server.run, kwargs=sockets, name="lp-starting", daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        """Stop answering, and return the listener for whoever answers next."""
        self._server.should_exit = True
        self._thread.join()
        return self._listener


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request of any kind, as an ASGI application."""
    if scope["type"] != "http":
        return
    closing = {"Connection": "close"}
    if scope["path"] == "/live":
        await JSONResponse({"status": "ok"}, headers=closing)(scope, receive, send)
        return
    error = ApiError(503, "the server is starting; try later", "server_error")
    error.headers.update(closing)
    await error.response()(scope, receive, send)
