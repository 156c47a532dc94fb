"""Connecting this process to a Ray cluster, which may ask for a token."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys

from lp_runtime.errors import LaunchError, first_line

CONNECT_SECONDS = 10.0  # that the cluster may take to answer
ASK_CLUSTER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def connect(address: str | None) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: HOST:PORT; None for the one that this machine or job belongs to, else a local one that starts here.

    Raises:
        LaunchError: if it cannot be reached or started.
    """
    import ray

    _probe(address)
    cluster = _resolved(address)
    if cluster:
        _authenticate(cluster, address or cluster)
    include_dashboard = None if cluster else False  # the latter is for a cluster that starts here
    try:
        ray.init(address=cluster, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=include_dashboard)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and more
        where = f" at launcher.address={address}" if address else ""
        raise LaunchError(f"launcher=ray: cannot reach or start a Ray cluster{where}: {first_line(error)}") from error


def _resolved(address: str | None) -> str | None:
    """Return the address of the cluster that Ray would connect to; None for one that starts here."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # takes None
    except Exception:  # ray://HOST:PORT, or a malformed address, which ray.init reports
        return address


def _authenticate(address: str, name: str) -> None:
    """Use the user's token if the cluster asks for one, and only then: without one, it would end the actors of a driver
    that has a token.

    Args:
        address: HOST:PORT.
        name: of the cluster, for a message.

    Raises:
        LaunchError: if there is no token, or the cluster refuses it.
    """
    try:
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:  # Ray before 2.51 has no tokens
        return
    if not _is_refused(address):
        return
    tokens.logger.setLevel(logging.ERROR)  # it would warn that tokens are on
    if tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False) and not _is_refused(address):
        return
    raise LaunchError(
        f"launcher=ray: the Ray cluster at {name} asks for another token: set RAY_AUTH_TOKEN, or"
        " RAY_AUTH_TOKEN_PATH to a file that holds it"
    )


def _is_refused(address: str) -> bool:
    """Whether a cluster refuses this process's token, or that it has none."""
    command = [sys.executable, "-P", "-c", ASK_CLUSTER, address]  # in a separate process, whose log lines are not shown
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return "AuthenticationError" in asked.stderr


def _probe(address: str | None) -> None:
    """Try to connect to the cluster's port. Ray itself tries for minutes, and logs many lines."""
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address or "")
    if not match:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"launcher=ray: no Ray cluster at launcher.address={address}: {reason}") from error
