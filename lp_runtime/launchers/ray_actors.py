"""Replicas as Ray actors, one a GPU. The driver starts them, streams from rank 0 and tears them down; it is never
inside a step. Ray is imported here only, and only when this launcher is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator

from lp_runtime.config import RuntimeConfig
from lp_runtime.errors import ConfigError, LaunchError, first_line
from lp_runtime.launchers.messages import Failed
from lp_runtime.launchers.replica_server import ReplicaServer
from lp_runtime.launchers.team import Place, TeamLauncher
from lp_runtime.parallel.group import host_store

# A replica on CPUs shares the cores with its peers, so it books next to nothing: Ray would refuse gpus=4 on 2 cores.
CPU_SHARE = 0.01
BATCH_SECONDS = 0.005  # runs of tokens that come closer together travel to the driver together
CONNECT_SECONDS = 10.0
HOST_SECONDS = 10.0  # that a replica may take to open a store
LANES = {"serve": 1, "post": 1, "host": 1}  # of an actor: calls of one lane run one after another


class ReplicaActor:
    """One replica in a Ray actor."""

    def __init__(self, config: RuntimeConfig):
        self._config = config
        self._said: queue.Queue[object] = queue.Queue()
        self._server: ReplicaServer | None = None
        self._store = None

    def serve(self, place: Place) -> Iterator[list[object]]:
        """Be a replica, in a thread of its own, and stream what it says in small batches: no step waits for that."""
        server = ReplicaServer(self._config, place.device_index, place.num_local, self._said.put)

        def run() -> None:
            server.run()
            self._said.put(None)

        self._server = server
        threading.Thread(target=run, daemon=True).start()
        batch: list[object] = []
        while None not in batch:
            batch = [self._said.get()]
            time.sleep(BATCH_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._said.get_nowait())
            yield [message for message in batch if message is not None]

    def post(self, message: object) -> None:
        """Take a message of the driver's; the replica has said something before."""
        self._server.post(message)

    def host(self, port: int) -> tuple[str, int] | Failed:
        """Open a store that replicas can meet in, if it is not open; returns its address."""
        import ray

        try:
            address = ray.util.get_node_ip_address()
            if self._store is None:
                self._store = host_store(address, port, self._config.launcher.start_timeout)
            return address, self._store.port
        except Exception as error:
            return Failed.from_error(error)


def connect(address: str | None) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: HOST:PORT; None for the one that this machine or job belongs to, else a local one that starts here.

    Raises:
        LaunchError: if it cannot be reached or started.
    """
    import ray

    _probe(address)
    options = {} if address else {"include_dashboard": False}  # the latter is for a cluster that starts here
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and more
        where = f" at launcher.address={address}" if address else ""
        raise LaunchError(f"launcher=ray: cannot reach or start a Ray cluster{where}: {first_line(error)}") from error


def _probe(address: str | None) -> None:
    """Knock at the cluster's door. Ray itself knocks for minutes at a dead one, and logs many lines."""
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address or "")
    if not match:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"launcher=ray: no Ray cluster at launcher.address={address}: {reason}") from error


class RayLauncher(TeamLauncher):
    """launcher=ray: a placement group, one actor a GPU, the process group formed among the actors."""

    def __init__(self, config: RuntimeConfig):
        try:
            import ray
        except ImportError as error:
            raise LaunchError("launcher=ray: ray is not installed (pip install 'lp-runtime[ray]')") from error
        self._ray = ray
        self.num_replicas = config.gpus or 1
        self._actors: dict[int, object] = {}
        self._streams: dict[int, object] = {}
        self._placement = None
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            connect(config.launcher.address)
        try:
            self._start(self._book(config))
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.RayError):
                raise LaunchError(f"launcher=ray: {first_line(error)}") from error
            raise

    def _book(self, config: RuntimeConfig) -> RuntimeConfig:
        """Have Ray set the replicas' resources aside; returns the configuration with the device that they have."""
        ray, launcher = self._ray, config.launcher
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        on_gpus = config.device == "cuda" or (config.device == "auto" and num_gpus > 0)
        if on_gpus and self.num_replicas > num_gpus:
            raise ConfigError(f"gpus={self.num_replicas}: the Ray cluster has {num_gpus} (on CPUs: device=cpu)")
        # Cores are for what feeds a GPU; a cluster may have fewer than one to spare for each.
        self._bundle = {"GPU": 1.0, "CPU": CPU_SHARE} if on_gpus else {"CPU": CPU_SHARE}
        bundles = [self._bundle] * self.num_replicas
        self._placement = ray.util.placement_group(bundles, strategy=launcher.placement.upper())
        if not self._placement.wait(launcher.start_timeout):
            raise LaunchError(
                f"launcher=ray: the cluster has no room for {self.num_replicas} x {self._bundle}"
                f" within launcher.start_timeout={launcher.start_timeout:g} seconds"
            )
        # Decided here for all: a node may have GPUs that this runtime has not booked.
        return dataclasses.replace(config, device="cuda" if on_gpus else "cpu")

    def _launch(self, index: int) -> None:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placement, placement_group_bundle_index=index
        )
        actor_class = self._ray.remote(concurrency_groups=LANES)(ReplicaActor)
        options = {"num_cpus": CPU_SHARE, "num_gpus": self._bundle.get("GPU", 0), "scheduling_strategy": strategy}
        actor = actor_class.options(**options).remote(self._config)
        serve = actor.serve.options(num_returns="streaming", concurrency_group="serve")
        self._actors[index], self._streams[index] = actor, serve.remote(self._place(index))

    def _place(self, index: int) -> Place:
        nodes = self._ray.util.placement_group_table(self._placement)["bundles_to_node_id"]
        return Place(0, sum(node == nodes[index] for node in nodes.values()))

    def _meeting_place(self, leader: int) -> tuple[str, int] | None:
        actor = self._actors.get(leader)
        if actor is None:
            return None
        call = actor.host.options(concurrency_group="host").remote(self._config.launcher.port)
        try:
            answer = self._ray.get(call, timeout=HOST_SECONDS)
        except self._ray.exceptions.RayError:
            return None
        if isinstance(answer, Failed):
            raise (answer.kind or LaunchError)(f"rank {leader} failed at start: {answer.message}")
        return answer

    def _send(self, index: int, message: object) -> None:
        actor = self._actors.get(index)
        if actor is not None:
            actor.post.options(concurrency_group="post").remote(message)

    def _receive(self, timeout: float) -> list[tuple[int, object]]:
        indices = {stream: index for index, stream in list(self._streams.items())}
        if not indices:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(indices), num_returns=1, timeout=timeout)
        messages = []
        for stream in ready:
            index = indices[stream]
            try:
                batch = self._ray.get(next(stream))
            except (self._ray.exceptions.RayError, StopIteration) as error:
                batch = [Failed(f"its actor ended ({self._reason(error)})", None)]
            if self._streams.get(index) is not stream:  # it was killed from here
                continue
            if isinstance(batch[-1], Failed):
                self._streams.pop(index, None)
            messages += [(index, message) for message in batch]
        return messages

    @staticmethod
    def _reason(error: Exception) -> str:
        # A process that was lost has nothing to say; one that could not make its actor ends with the reason.
        lines = str(error).strip().splitlines()
        return lines[-1].strip() if lines and "creation task" in lines[0] else type(error).__name__

    def _kill(self, index: int) -> None:
        self._streams.pop(index, None)
        actor = self._actors.pop(index, None)
        if actor is not None:
            self._ray.kill(actor)

    def _end(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            return
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._streams = {}, {}
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)
            self._placement = None
        if self._connected_here:
            ray.shutdown()
