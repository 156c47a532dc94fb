"""A placeholder HTTP server that answers on the port while the model is being loaded."""

from __future__ import annotations

import socket
import threading

import uvicorn
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lp_runtime.server.connections import HttpLimits, LimitedConfig
from lp_runtime.server.errors import ApiError


class StartingServer:
    """Server in a separate thread that answers /live with status 200 and everything else with 503.

    `listener` is a listening socket; it is never closed here, and `hand_over` returns it.
    """

    def __init__(self, listener: socket.socket, limits: HttpLimits):
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(LimitedConfig(answer, limits))
        # uvicorn closes its socket when it ends. The duplicate shares the accept queue, so connections that arrive
        # during the hand-over wait there instead of being refused.
        sockets = {"sockets": [listener.dup()]}
        self._thread = threading.Thread(target=self._server.run, kwargs=sockets, name="lp-starting", daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        """Stop answering, and return the listener for the real server."""
        self._server.should_exit = True
        self._thread.join()
        return self._listener


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application: answer /live with status 200, everything else with 503."""
    if scope["type"] != "http":
        return
    closing = {"Connection": "close"}
    if scope["path"] == "/live":
        await JSONResponse({"status": "ok"}, headers=closing)(scope, receive, send)
        return
    error = ApiError(503, "the server is starting; try later", "server_error")
    error.headers.update(closing)
    await error.response(scope["path"])(scope, receive, send)
