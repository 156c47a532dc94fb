"""lp-serve: a runtime, a scheduler and an HTTP server in one process, until SIGINT or SIGTERM."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from lp_runtime.config.commands import ServeConfig
from lp_runtime.distributed.context import started_by_torchrun
from lp_runtime.errors import ConfigError, LaunchError, first_line
from lp_runtime.model.loader import load_tokenizer
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

GRACE_SECONDS = 5  # for running answers to end after SIGINT or SIGTERM


def check_serve(config: ServeConfig) -> None:
    """Refuse, before a model is loaded, settings that cannot be served.

    Raises:
        ConfigError: the port is taken, or torchrun started this process and server=ray_serve.
        LaunchError: the server's packages are not installed.
        ModelError: the model has no tokenizer.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"lp-serve: {error.name} is not installed (pip install 'lp-runtime[serve]')") from error
    load_tokenizer(config.model)
    if config.server == "uvicorn":
        listen(config).close()
    elif started_by_torchrun():
        raise ConfigError("server=ray_serve: torchrun started this process; start without torchrun")


def application(runtime: LookaheadRuntime, scheduler: Scheduler, config: ServeConfig) -> FastAPI:
    """Return the HTTP application of a server."""
    from lp_runtime.server.app import Server, ServerSettings

    settings = ServerSettings(
        name=served_name(config),
        api_key=config.api_key,
        max_body_bytes=config.max_body_bytes,
        max_new_tokens=config.max_new_tokens,
        queue_timeout=config.queue_timeout,
    )
    return Server(runtime, scheduler, settings, load_tokenizer(config.model)).app()


def served_name(config: ServeConfig) -> str:
    """Return the model's name for clients."""
    return config.served_name or Path(config.model.location).name


def serve(runtime: LookaheadRuntime, config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port is taken.
    """
    listener = listen(config)
    with Scheduler(runtime, config.max_waiting, config.policy, config.max_batch) as scheduler:
        app = application(runtime, scheduler, config)
        host, port = listener.getsockname()[:2]
        print(f"serving {served_name(config)} on http://{host}:{port}/v1", flush=True)
        http_server(app).run(sockets=[listener])


def http_server(app: FastAPI) -> uvicorn.Server:
    """Return the HTTP server of an application; its `run` serves until SIGINT or SIGTERM."""
    import uvicorn

    options = uvicorn.Config(
        app,
        http="h11",  # the strictest parser, whatever others are installed
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(options)


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the host and port of the settings.

    Raises:
        ConfigError: the address does not exist here, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, ValueError) as error:  # ValueError for a text that cannot be a host name
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(f"host={config.host} port={config.port}: {reason}") from error
