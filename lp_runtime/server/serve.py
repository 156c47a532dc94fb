"""lp-serve: a runtime, a scheduler and an HTTP server in one process, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time

import uvicorn
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import ReplicaError
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.app import Server
from lp_runtime.server.http.connections import LimitedConfig, LimitedProtocol
from lp_runtime.server.http.errors import ApiError
from lp_runtime.server.http.gate import access_log
from lp_runtime.server.http.settings import served_name

POLL_SECONDS = 0.05  # between looks whether running answers have ended


class StartingServer:
    """Server while the model is loaded: answers /live with status 200, everything else with 503.

    It runs in a separate thread. `listener` is a listening socket, which `hand_over` returns open.
    """

    def __init__(self, listener: socket.socket, config: ServeConfig):
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(LimitedConfig(_answer_starting, config))
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


async def _answer_starting(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    closing = {"Connection": "close"}
    if scope["path"] == "/live":
        await JSONResponse({"status": "ok"}, headers=closing)(scope, receive, send)
        return
    error = ApiError(503, "the server is starting; try later", "server_error")
    error.headers.update(closing)
    await error.response(scope["path"])(scope, receive, send)


class HttpServer(uvicorn.Server):
    """Server of the routes until SIGINT or SIGTERM, or until all replicas are lost for good.

    Running answers then get `shutdown_timeout` to finish.
    """

    def __init__(self, routes: Server, scheduler: Scheduler, config: ServeConfig):
        super().__init__(LimitedConfig(routes.app(), config))
        self._routes, self._scheduler = routes, scheduler
        self._shutdown_timeout = config.shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        """Whether the server shall end; called ten times a second."""
        return await super().on_tick(counter) or not self._scheduler.has_replicas

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests with status 503, and close the port when running answers have ended.

        After `shutdown_timeout` they are ended, and clients receive an error.
        """
        self._routes.drain()
        await self._wait_for_answers()
        self._routes.abort(ReplicaError("the server is shutting down"))
        # uvicorn would log tasks that exceed its graceful shutdown as errors; here they are expected.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)

    async def _wait_for_answers(self) -> None:
        """Wait until the requests of now are answered or their clients have gone; at most `shutdown_timeout`."""
        connections = [each for each in self.server_state.connections if isinstance(each, LimitedProtocol)]
        cycles = [each.cycle for each in connections if not each.is_idle]
        deadline = time.monotonic() + self._shutdown_timeout
        while time.monotonic() < deadline and not self.force_exit:
            if all(each.response_complete or each.disconnected for each in cycles):
                break
            await asyncio.sleep(POLL_SECONDS)


def serve(runtime: LookaheadRuntime, config: ServeConfig, starting: StartingServer) -> None:
    """Serve until SIGINT or SIGTERM, on the port that `starting` hands over.

    Raises ReplicaError if all replicas were lost for good; a supervisor then starts this process again.
    """
    if config.access_log:
        _write_access_log()
    with Scheduler(runtime, config.max_waiting, config.policy, config.max_batch) as scheduler:
        routes = Server(runtime, scheduler, config)
        server = HttpServer(routes, scheduler, config)
        listener = starting.hand_over()
        host, port = listener.getsockname()[:2]
        scheme = "http" if config.ssl_certfile is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"serving {served_name(config)} on {url}/v1", flush=True)
        print(f"a page to try it: {url}/", file=sys.stderr, flush=True)
        try:
            server.run(sockets=[listener])  # raises the signal that ended it again, once it has shut down
            if not scheduler.has_replicas:
                raise ReplicaError(f"no replica is left ({scheduler.why_lost})")
        finally:
            routes.close()


def _write_access_log() -> None:
    """Write the lines of the access log to stderr, without a prefix."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False
