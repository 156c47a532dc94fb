"""Connects this process to a Ray cluster, with a token if the cluster requires one."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import subprocess
import sys

from lp_runtime.distributed.environment import ray_address
from lp_runtime.errors import LaunchError, first_line

CONNECT_SECONDS = 10.0  # limit for a connection to the cluster's port
ANSWER_SECONDS = 30.0  # limit for the cluster's answer, the import of Ray included
ASK_CLUSTER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def connect(address: str | None) -> None:
    """Connect to the Ray cluster at HOST:PORT; None for that of RAY_ADDRESS or this machine, else a new local one."""
    import ray

    where = f"launcher.address={address}" if address else ""
    if address in (None, "auto") and (of_job := ray_address()):  # Ray would read it, too
        address, where = of_job, f"RAY_ADDRESS={of_job}"
    _probe(address, where)
    cluster = _resolved(address)
    if cluster:
        _authenticate(cluster, address or cluster)
    include_dashboard = None if cluster else False  # False only if this starts a local cluster
    try:
        ray.init(address=cluster, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=include_dashboard)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and more
        at = f" at {where}" if where else ""
        raise LaunchError(f"launcher=ray: cannot reach or start a Ray cluster{at}: {first_line(error)}") from error


def check_connected(connected: str, address: str | None) -> None:
    """Raise LaunchError if an address names another cluster than that at `connected`, which this program uses."""
    if address in (None, "auto"):
        return
    host, colon, port = (_resolved(address) or "").rpartition(":")
    with contextlib.suppress(OSError, UnicodeError):  # the name of no machine
        host = socket.gethostbyname(host)
    if f"{host}{colon}{port}" != connected:
        raise LaunchError(
            f"launcher.address={address}: this program is connected to the Ray cluster at {connected} already; leave"
            " the setting out, or call ray.shutdown() first"
        )


def _resolved(address: str | None) -> str | None:
    """Return the address that Ray would connect to; None if it would start a local cluster."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # accepts None
    except Exception:  # ray://HOST:PORT, or a malformed address that ray.init will report
        return address


def _authenticate(address: str, name: str) -> None:
    """Enable the user's token if the cluster requires one; LaunchError if none answers at HOST:PORT."""
    if not re.fullmatch(r"(?!ray://).+:\d+", address):  # Ray Client has other tokens, and ray.init reports the rest
        return
    try:
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:  # Ray before 2.51 has no tokens
        return
    if not _is_refused(address, name):
        return  # a cluster that requires no token ends the actors of a driver with one
    tokens.logger.setLevel(logging.ERROR)  # hide the warning that tokens are enabled
    if tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False) and not _is_refused(address, name):
        return
    raise LaunchError(
        f"launcher=ray: the Ray cluster at {name} asks for another token: set RAY_AUTH_TOKEN, or"
        " RAY_AUTH_TOKEN_PATH to the path of a file that contains it"
    )


def _is_refused(address: str, name: str) -> bool:
    """Whether a cluster refuses this process's token, or requires one that it lacks; LaunchError if none answers."""
    command = [sys.executable, "-P", "-c", ASK_CLUSTER, address]  # a separate process, so that Ray's log stays hidden
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
        if "AuthenticationError" in asked.stderr:
            return True
        has_answered = asked.returncode == 0
    except subprocess.TimeoutExpired:
        has_answered = False
    if not has_answered:  # ray.init would try for minutes, with many lines
        raise LaunchError(
            f"launcher=ray: no Ray cluster answers at {name}: give the port of the head that `ray start` shows, 6379 by"
            " default, not that of its dashboard"
        )
    return False


def _probe(address: str | None, where: str) -> None:
    """Try to connect to the cluster's port: Ray retries a dead address for minutes, with many log lines."""
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address or "")
    if not match:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"launcher=ray: no Ray cluster at {where}: {reason}") from error
