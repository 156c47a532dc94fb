"""lp-serve: a runtime, a scheduler and an HTTP server in one process, until SIGINT or SIGTERM."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lp_runtime.config.serving import ServeConfig
from lp_runtime.distributed.context import started_by_torchrun
from lp_runtime.errors import ConfigError, LaunchError, ReplicaError, first_line
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from lp_runtime.server.app import Server
    from lp_runtime.server.connections import HttpLimits, HttpServer
    from lp_runtime.server.starting import StartingServer


def check_serve(config: ServeConfig) -> None:
    """Check that the settings can be served, before a model is loaded."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"lp-serve: {error.name} is not installed (pip install 'lp-runtime[serve]')") from error
    load_tokenizer(config.model)
    read_api_keys(config)
    _check_certificate(config)
    if config.otlp_endpoint is not None:
        from lp_runtime.server.tracing import check_tracing

        check_tracing()
    if config.server == "ray_serve" and started_by_torchrun():
        raise ConfigError("server=ray_serve: torchrun started this process; start without torchrun")


def make_server(runtime: LookaheadRuntime, scheduler: Scheduler, config: ServeConfig) -> Server:
    """Build the routes from the settings."""
    from lp_runtime.server.app import Server
    from lp_runtime.server.gate import GateRules
    from lp_runtime.server.submission import ServerSettings
    from lp_runtime.server.tracing import Tracing

    rules = GateRules(
        api_keys=read_api_keys(config),
        allowed_hosts=allowed_hosts(config),
        cors_origins=config.cors_origins,
        max_body_bytes=config.max_body_bytes,
        body_timeout=config.body_timeout,
        logs_access=config.access_log,
    )
    name = served_name(config)
    settings = ServerSettings(
        name=name,
        gate=rules,
        max_new_tokens=config.max_new_tokens,
        queue_timeout=config.queue_timeout,
        strict_fields=config.strict_fields,
        tracing=None if config.otlp_endpoint is None else Tracing.to(config.otlp_endpoint, name),
        health_interval=config.health_interval,
        health_timeout=config.health_timeout,
        tool_format=config.tool_format,
        reasoning=config.reasoning,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    return Server(runtime, scheduler, settings, load_tokenizer(config.model))


def read_api_keys(config: ServeConfig) -> dict[str, str]:
    """Return the API keys by the client's name: the file's lines NAME KEY, and `api_key` as "default"."""
    keys = {} if config.api_key is None else {"default": config.api_key}
    if config.api_keys is None:
        return keys
    try:
        lines = Path(config.api_keys).expanduser().read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys={config.api_keys}: {_reason(error)}") from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] in keys or not words[1].isprintable():
            raise ConfigError(f"api_keys={config.api_keys} line {number}: must be NAME KEY, each name once")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError(f"api_keys={config.api_keys}: has no key")
    return keys


def allowed_hosts(config: ServeConfig) -> list[str]:
    """Return the accepted Host headers; an empty list for any.

    Without the setting, a server on a loopback address accepts the names of that address only, which prevents DNS
    rebinding. On other addresses, and with Ray Serve, whose proxies receive the requests, any name is accepted.
    """
    if config.allowed_hosts is not None:
        return config.allowed_hosts
    if config.server == "ray_serve":
        return []
    try:
        is_local = config.host == "localhost" or ipaddress.ip_address(config.host).is_loopback
    except ValueError:  # the host is a name, not an address
        is_local = False
    host = f"[{config.host}]" if ":" in config.host else config.host
    return list(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", host))) if is_local else []


def _check_certificate(config: ServeConfig) -> None:
    """Raise ConfigError if TLS cannot load the certificate or its key."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile={config.ssl_certfile}: {_reason(error)}") from error


def served_name(config: ServeConfig) -> str:
    """Return the model's name for clients."""
    return config.served_name or Path(config.model.location).name


def open_port(config: ServeConfig) -> StartingServer:
    """Listen on the port and answer requests with "the server is starting"."""
    from lp_runtime.server.starting import StartingServer

    return StartingServer(listen(config), http_limits(config))


def serve(runtime: LookaheadRuntime, config: ServeConfig, starting: StartingServer) -> None:
    """Serve until SIGINT or SIGTERM, on the port that `starting` hands over.

    Raises:
        ReplicaError: if all replicas were lost and none may be started again; a supervisor then starts this process
            again.
    """
    if config.access_log:
        log_to_stderr(logging.getLogger("lp_runtime.access"))
    with Scheduler(runtime, config.max_waiting, config.policy, config.max_batch) as scheduler:
        routes = make_server(runtime, scheduler, config)
        server = http_server(routes, http_limits(config))
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


def log_to_stderr(log: logging.Logger) -> None:
    """Write a logger's messages to stderr, without a prefix."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def http_limits(config: ServeConfig) -> HttpLimits:
    """Return the limits of the HTTP server that the settings ask for."""
    from lp_runtime.server.connections import HttpLimits

    certificate = None
    if config.ssl_certfile is not None:
        certificate = (config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile)
    return HttpLimits(
        header_timeout=config.header_timeout,
        keep_alive_timeout=config.keep_alive_timeout,
        max_connections=config.max_connections,
        shutdown_timeout=config.shutdown_timeout,
        certificate=certificate,
    )


def http_server(server: Server, limits: HttpLimits | None = None) -> HttpServer:
    """Build an HTTP server for the routes; its `run` serves until SIGINT or SIGTERM."""
    from lp_runtime.server.connections import HttpLimits, HttpServer

    return HttpServer(server, limits or HttpLimits())


def listen(config: ServeConfig) -> socket.socket:
    """Open a socket that listens on the host and port of the settings."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, ValueError) as error:  # ValueError: the text cannot be a host name
        raise ConfigError(f"host={config.host} port={config.port}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the system's description of an error, without errno and file name."""
    return getattr(error, "strerror", None) or first_line(error)
