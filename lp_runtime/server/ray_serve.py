"""The server as an application of Ray Serve. Ray is imported only when it is chosen.

One Serve replica has the runtime and the scheduler; the model's replicas are actors of launcher=ray in the same
cluster. There is one of it: what is scaled is the number of the model's replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lp_runtime.config.commands import ServeConfig
from lp_runtime.config.overrides import load_config
from lp_runtime.errors import LaunchError, ReplicaError, first_line
from lp_runtime.launchers.ray_launcher import CPU_SHARE, connect
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.scheduler.scheduler import Scheduler
from lp_runtime.server.serve import GRACE_SECONDS, application, listen, served_name

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "lp_runtime"  # of the application
MAX_REQUESTS = 10_000  # that are let in at once: it is the scheduler that says when there are too many
END_SECONDS = 10.0  # that the runtime may take to end, beside what answers may take


class Service:
    """What the Serve replica runs: the runtime, the scheduler and the HTTP routes."""

    async def __init__(self, config: ServeConfig):
        self._config = config
        self._runtime = await asyncio.to_thread(LookaheadRuntime.from_config, config)
        self._scheduler = Scheduler(self._runtime, config.max_waiting, config.policy, config.max_batch)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return application(self._runtime, self._scheduler, self._config)

    def check_health(self) -> None:
        """For Ray Serve, which starts this anew if it raises a few times; while replicas start, /health alone says 503.

        Raises:
            ReplicaError: if no replica of the model is up, and none is being started.
        """
        launcher = self._runtime.launcher  # asked twice: one may come up between two looks
        if not (launcher.num_ready or launcher.num_loading or launcher.num_ready):
            raise ReplicaError("no replica of the model is left")

    async def __del__(self) -> None:
        """Ray Serve calls it when it ends the replica."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._scheduler.close()
        self._runtime.close()


def build(arguments: dict[str, Any]) -> Any:
    """The Serve application, for its config files and `serve run lp_runtime.server.ray_serve:build gpus=4`.

    Args:
        arguments: settings by key, as lp-serve takes them; `host` and `port` are Ray Serve's own.

    Raises:
        ConfigError: if a setting is unknown or not allowed.
    """
    overrides = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in ({"server": "ray_serve"} | arguments).items()
    ]
    return build_from_config(load_config(ServeConfig, overrides))


def build_from_config(config: ServeConfig) -> Any:
    """The same from a whole configuration."""
    from ray import serve

    deployment = serve.deployment(
        serve.ingress()(Service),
        name=NAME,
        num_replicas=1,
        max_ongoing_requests=MAX_REQUESTS,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=GRACE_SECONDS + END_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": CPU_SHARE},
    )
    return deployment.bind(replace(config, launcher=replace(config.launcher, name="ray")))


def serve_on_ray(config: ServeConfig) -> None:
    """lp-serve server=ray_serve: deploy the application, and take it away at SIGINT or SIGTERM.

    Raises:
        ConfigError: if the port is taken.
        LaunchError: if Ray Serve is not installed, or the application cannot be started.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise LaunchError(f"server=ray_serve: {first_line(error)} (pip install 'lp-runtime[ray-serve]')") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    connect(config.launcher.address)
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())  # Ray has set its own
    is_shared = False
    try:
        is_shared = bool(serve.status().proxies)
        if not is_shared:
            listen(config).close()
        try:
            if not is_shared:
                serve.start(http_options={"host": config.host, "port": config.port})
            serve.run(build_from_config(config), name=NAME)
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise LaunchError(f"server=ray_serve: {_reason(error, serve.status())}") from error
        where = "by the cluster's Ray Serve" if is_shared else f"on http://{config.host}:{config.port}/v1"
        print(f"serving {served_name(config)} {where}", flush=True)
        told_to_end.wait()
    finally:
        if is_shared:
            serve.delete(NAME)
        else:
            serve.shutdown()
        ray.shutdown()


def _reason(error: Exception, status: Any) -> str:
    """What the Serve replica has said, else the error itself: the last line, behind where it happened."""
    application = status.applications.get(NAME)
    told = [each.message for each in application.deployments.values()] if application else []
    lines = [line.strip() for text in (str(error), *told) for line in text.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+Error: ", "", lines[-1]) if lines else type(error).__name__
