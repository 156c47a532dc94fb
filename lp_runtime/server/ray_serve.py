"""The server as an application of Ray Serve. Ray is imported only with server=ray_serve.

One Serve replica holds the runtime and the scheduler. The model's replicas are actors of launcher=ray in the same
cluster; their number is what scales, there is always one Serve replica.
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
from lp_runtime.errors import LaunchError, ReplicaError, first_line
from lp_runtime.launchers.ray_booking import CPU_SHARE
from lp_runtime.launchers.ray_connection import connect
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.serve import listen, make_server, served_name

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from ray.serve.schema import ServeStatus

APPLICATION = "lp_runtime"
MAX_REQUESTS = 10_000  # at once, before Ray Serve refuses any: the scheduler refuses them long before
CLOSE_SECONDS = 10.0  # for the runtime to end, after shutdown_timeout for answers


class Service:
    """The Serve replica: a runtime, a scheduler and the HTTP routes.

    Args:
        config: settings of the server.
    """

    async def __init__(self, config: ServeConfig):  # type: ignore[misc]  # Ray Serve awaits it
        self._config = config
        self._runtime = await asyncio.to_thread(LookaheadRuntime.from_config, config)
        self._scheduler = Scheduler(self._runtime, config.max_waiting, config.policy, config.max_batch)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application; Ray Serve calls it."""
        return make_server(self._runtime, self._scheduler, self._config).app()

    def check_health(self) -> None:
        """Check that the model has replicas; Ray Serve calls it, and restarts the Serve replica after a few errors.

        Raises:
            ReplicaError: no replica of the model is up, and none is being started.
        """
        launcher = self._runtime.launcher  # num_ready is read twice: a replica may come up between the first two reads
        if not (launcher.num_ready or launcher.num_loading or launcher.num_ready):
            raise ReplicaError("no replica of the model is left")

    async def __del__(self) -> None:
        """End the scheduler and the runtime; Ray Serve calls it when it ends the Serve replica."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._scheduler.close()
        self._runtime.close()


def build(arguments: Mapping[str, object]) -> Application:
    """Return the Serve application, for its config files and `serve run lp_runtime.server.ray_serve:build gpus=4`.

    Args:
        arguments: settings by key, as lp-serve takes them; `host` and `port` are Ray Serve's own.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    overrides = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in {"server": "ray_serve", **arguments}.items()
    ]
    return build_from_config(load_config(ServeConfig, overrides))


def build_from_config(config: ServeConfig) -> Application:
    """Return the Serve application of a whole configuration; its launcher becomes ray."""
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
    """Deploy the application, and remove it at SIGINT or SIGTERM: lp-serve server=ray_serve.

    Raises:
        ConfigError: the port is taken.
        LaunchError: Ray Serve is not installed, or the application cannot be started.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise LaunchError(f"server=ray_serve: {first_line(error)} (pip install 'lp-runtime[ray-serve]')") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    connect(config.launcher.address)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # replaces the handler that Ray has set
    is_shared = False
    try:
        is_shared = bool(serve.status().proxies)
        if not is_shared:
            listen(config).close()
        try:
            if not is_shared:
                serve.start(http_options={"host": config.host, "port": config.port})
            serve.run(build_from_config(config), name=APPLICATION)
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
    """Return the last line of the Serve replica's message, else of the error, without the error's class."""
    application = status.applications.get(APPLICATION)
    messages = [each.message for each in application.deployments.values()] if application else []
    lines = [line.strip() for text in (str(error), *messages) for line in text.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+Error: ", "", lines[-1]) if lines else type(error).__name__
