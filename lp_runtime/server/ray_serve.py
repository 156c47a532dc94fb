"""The server as a Ray Serve application. Ray is imported only with server=ray_serve.

One Serve replica holds the runtime and the scheduler. The model's replicas are actors of launcher=ray in the same
cluster. To scale, change the number of actors; there is always one Serve replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lp_runtime.config.overrides import load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.errors import ConfigError, LaunchError, ReplicaError, first_line
from lp_runtime.launchers.ray_booking import CPU_SHARE
from lp_runtime.launchers.ray_connection import connect
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.app import Server
from lp_runtime.server.http.settings import check_serve, listen, served_name

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from ray.serve.schema import ServeStatus

APPLICATION = "lp_runtime"
MAX_REQUESTS = 10_000  # concurrent requests for Ray Serve; so high that the scheduler's own limit applies first
CLOSE_SECONDS = 10.0  # for the runtime to close, in addition to shutdown_timeout for running answers


class Service:
    """The Serve replica: a runtime, a scheduler and the HTTP routes."""

    async def __init__(self, config: ServeConfig):  # type: ignore[misc]  # Ray Serve awaits it
        self._config = config
        await asyncio.to_thread(check_serve, config)  # on this node, whose files and packages are used
        self._runtime = await asyncio.to_thread(LookaheadRuntime.from_config, config)
        self._scheduler = Scheduler(self._runtime, config.max_waiting, config.policy, config.max_batch)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the HTTP application; called by Ray Serve."""
        return Server(self._runtime, self._scheduler, self._config).app()

    def check_health(self) -> None:
        """Raise a ReplicaError if no replica of the model is up, and none is being started.

        Ray Serve restarts the Serve replica after a few failed checks.
        """
        if not self._scheduler.has_replicas:
            raise ReplicaError(f"no replica of the model is left ({self._scheduler.why_lost})")

    async def __del__(self) -> None:
        """Close the scheduler and the runtime; called by Ray Serve when it stops the Serve replica."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._scheduler.close()
        self._runtime.close()


def build(arguments: Mapping[str, object]) -> Application:
    """Build the application for Serve config files or `serve run lp_runtime.server.ray_serve:build ...`.

    `arguments` are lp-serve settings by key; `host` and `port` have no effect, Ray Serve has its own.
    """
    overrides = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in {"server": "ray_serve", **arguments}.items()
    ]
    return build_from_config(load_config(ServeConfig, overrides))


def build_from_config(config: ServeConfig) -> Application:
    """Build the Serve application from a complete configuration; launcher=ray replaces its launcher."""
    if config.ssl_certfile is not None:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile}: not with server=ray_serve, whose proxies would serve plain HTTP;"
            " give the certificate to Ray Serve (http_options)"
        )
    from ray import serve

    deploy = serve.deployment(
        name=APPLICATION,
        num_replicas=1,
        max_ongoing_requests=MAX_REQUESTS,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=config.shutdown_timeout + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": CPU_SHARE},
    )
    deployment = deploy(serve.ingress()(Service))
    return deployment.bind(replace(config, launcher=replace(config.launcher, name="ray")))


def serve_on_ray(config: ServeConfig) -> None:
    """Deploy the application and remove it at SIGINT or SIGTERM: lp-serve server=ray_serve."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise LaunchError(f"server=ray_serve: {first_line(error)} (pip install 'lp-runtime[ray-serve]')") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    application = build_from_config(config)
    connect(config.launcher.address)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # replaces the handler that Ray has set
    is_shared = False
    try:
        is_shared = bool(serve.status().proxies)
        if not is_shared:
            listen(config).close()  # fails early, with a clear error, if the port is taken
        try:
            if not is_shared:
                serve.start(http_options={"host": config.host, "port": config.port})
            serve.run(application, name=APPLICATION)
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise LaunchError(f"server=ray_serve: {_reason(error, serve.status())}") from error
        where = "by the cluster's Ray Serve" if is_shared else f"on http://{config.host}:{config.port}/v1"
        print(f"serving {served_name(config)} {where}", flush=True)
        ended.wait()
    finally:
        if is_shared:
            serve.delete(APPLICATION)
        else:
            serve.shutdown()
        ray.shutdown()


def _reason(error: Exception, status: ServeStatus) -> str:
    """Return the last line of the deployment's status message, else of the error, without the error class."""
    application = status.applications.get(APPLICATION)
    messages = [each.message for each in application.deployments.values()] if application else []
    lines = [line.strip() for text in (str(error), *messages) for line in text.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+Error: ", "", lines[-1]) if lines else type(error).__name__
