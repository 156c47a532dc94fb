"""lp-serve's settings: their check before a model is loaded, and their API keys, hosts and socket.

The module needs none of the packages of the extra `serve`, because the check reports which of them are missing.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import ssl
from pathlib import Path

from lp_runtime.config.serving import ServeConfig
from lp_runtime.distributed.environment import started_by_torchrun
from lp_runtime.errors import ConfigError, LaunchError, first_line
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import check_variables
from lp_runtime.utils.files import read_ascii

OTHER_FILES = 64  # open files of a server that are no connections: 17 with one replica on a CPU
MIN_CONNECTIONS = 8  # even if the limit of open files is tiny: with 40, these and 8 refused ones fit


def check_serve(config: ServeConfig) -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"lp-serve: {error.name} is not installed (pip install 'lp-runtime[serve]')") from error
    load_tokenizer(config.model)
    check_variables(config.chat_template_kwargs, ConfigError)
    read_api_keys(config)
    if config.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_certfile={config.ssl_certfile}: {_reason(error)}") from error
    if config.otlp_endpoint is not None:
        _check_tracing()
    if config.server == "ray_serve" and started_by_torchrun():
        raise ConfigError("server=ray_serve: torchrun started this process; start without torchrun")


def _check_tracing() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"otlp_endpoint: {error.name} is not installed (pip install 'lp-runtime[otel]')") from error


def read_api_keys(config: ServeConfig) -> dict[str, str]:
    """Return the API keys by the client's name: the file's lines NAME KEY, and `api_key` as "default"."""
    keys = {} if config.api_key is None else {"default": config.api_key}
    if config.api_keys is None:
        return keys
    try:
        lines = read_ascii(config.api_keys).splitlines()
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
        is_local = config.host == "localhost" or ipaddress.ip_address(_without_brackets(config.host)).is_loopback
    except ValueError:  # the host is a name, not an address
        is_local = False
    host = f"[{_without_brackets(config.host)}]" if ":" in config.host else config.host
    return list(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", host))) if is_local else []


def served_name(config: ServeConfig) -> str:
    """Return the model's name for clients."""
    location = config.model.location
    return config.served_name or Path(os.path.abspath(location) if Path(location).is_dir() else location).name


def max_connections(config: ServeConfig) -> int:
    """Return how many connections the server keeps open: half of the open files that are left for them.

    The other half is for connections that are being refused.
    """
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(MIN_CONNECTIONS, (max_files - OTHER_FILES) // 2))


def listen(config: ServeConfig) -> socket.socket:
    """Return the server's listening socket; that of all IPv6 addresses accepts IPv4 clients, too."""
    try:
        host = _without_brackets(config.host)
        family, *_, (address, *_) = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM)[0]
        takes_both = family == socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, config.port), family=family, backlog=2048, dualstack_ipv6=takes_both)
    except (OSError, ValueError) as error:  # ValueError: the text cannot be a host name
        raise ConfigError(f"host={config.host} port={config.port}: {_reason(error)}") from error


def _without_brackets(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def _reason(error: Exception) -> str:
    """Return the system's description of an error, without errno and file name."""
    return getattr(error, "strerror", None) or first_line(error)
