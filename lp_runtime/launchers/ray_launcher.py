"""Replicas as Ray actors, one a GPU. The driver starts them, streams from rank 0 and tears them down; it is never
inside a step. Ray is imported here only, and only when this launcher is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from types import ModuleType

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.process_group import address_of, host_store
from lp_runtime.errors import ConfigError, LaunchError, first_line
from lp_runtime.launchers.messages import Failed
from lp_runtime.launchers.replica_server import ReplicaServer
from lp_runtime.launchers.team import Place, TeamLauncher

# A replica on CPUs shares the cores with its peers, so it books next to nothing: Ray would refuse gpus=4 on 2 cores.
CPU_SHARE = 0.01
BATCH_SECONDS = 0.005  # runs of tokens that come closer together travel to the driver together
CONNECT_SECONDS = 10.0
HOST_SECONDS = 10.0  # that a replica may take to open a store
MAX_RESTARTS = 1  # by Ray, of an actor whose node is lost before it runs; one that ran is killed as its stream ends
LANES = {"serve": 1, "post": 1, "host": 1}  # of an actor: calls of one lane run one after another


class ReplicaActor:
    """One replica in a Ray actor."""

    def __init__(self, config: RuntimeConfig):
        self._config = config
        self._said: queue.Queue[object] = queue.Queue()
        self._server: ReplicaServer | None = None
        self._store = None

    def serve(self) -> Iterator[list[object]]:
        """Be a replica, in a thread of its own, and stream what it says in small batches: no step waits for that."""
        # Asked here, not by the driver: a replica that is started again may have got another node since.
        place = Booking.place_here()
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

    def post(self, data: bytes) -> None:
        """Take a message of the driver's, pickled; the replica has said something before."""
        try:
            message = pickle.loads(data)
        except Exception as error:  # what a caller's own class may raise
            self._said.put(Failed.from_error(error))
            self._said.put(None)
        else:
            self._server.post(message)

    def host(self, port: int) -> tuple[str, int] | Failed:
        """Open a store that replicas can meet in, if it is not open; returns its address."""
        import ray

        try:
            launcher = self._config.launcher
            address = ray.util.get_node_ip_address() if launcher.interface is None else address_of(launcher.interface)
            if self._store is None:
                self._store = host_store(address, port, launcher.start_timeout)
            return address, self._store.port
        except Exception as error:
            return Failed.from_error(error)


class Booking:
    """What Ray has set aside for the replicas: a placement group with a bundle for each, in the order of their indices.
    Those of a node that is lost go to another one as soon as there is room.

    Args:
        ray: the module, connected.
        config: the runtime's.

    Attributes:
        device: that the replicas are to have: cuda or cpu.

    Raises:
        ConfigError: if the cluster has fewer GPUs.
        LaunchError: if there is no room for them within launcher.start_timeout.
    """

    def __init__(self, ray: ModuleType, config: RuntimeConfig):
        self._ray = ray
        num_replicas, launcher = config.gpus or 1, config.launcher
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        on_gpus = config.device == "cuda" or (config.device == "auto" and num_gpus > 0)
        if on_gpus and num_replicas > num_gpus:
            raise ConfigError(f"gpus={num_replicas}: the Ray cluster has {num_gpus} (on CPUs: device=cpu)")
        # Cores are for what feeds a GPU; a cluster may have fewer than one to spare for each.
        self._bundle = {"GPU": 1.0, "CPU": CPU_SHARE} if on_gpus else {"CPU": CPU_SHARE}
        self.device = "cuda" if on_gpus else "cpu"
        self._group = ray.util.placement_group([self._bundle] * num_replicas, strategy=launcher.placement.upper())
        try:
            if not self._group.wait(launcher.start_timeout):
                raise LaunchError(
                    f"launcher=ray: the cluster has no room for {num_replicas} x {self._bundle}"
                    f" within launcher.start_timeout={launcher.start_timeout:g} seconds"
                )
        except BaseException:  # an interrupted wait, too, books nothing
            self.release()
            raise

    def options(self, index: int) -> dict[str, object]:
        """What an actor must be made with to be given a replica's bundle."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        return {"num_cpus": CPU_SHARE, "num_gpus": self._bundle.get("GPU", 0), "scheduling_strategy": strategy}

    def nodes(self) -> list[str]:
        """The id of each replica's node."""
        found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [found[index] for index in sorted(found)]

    def place(self, index: int) -> Place:
        """A replica's place. Ray shows an actor its own GPU only."""
        nodes = self.nodes()
        return Place(0, nodes.count(nodes[index]))

    @staticmethod
    def place_here() -> Place:
        """The place of the replica whose actor asks."""
        import ray

        found = ray.util.placement_group_table(ray.util.get_current_placement_group())["bundles_to_node_id"]
        return Place(0, list(found.values()).count(ray.get_runtime_context().get_node_id()))

    def release(self) -> None:
        """Give it back."""
        self._ray.util.remove_placement_group(self._group)


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
        self._booking: Booking | None = None
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            connect(config.launcher.address)
        try:
            self._booking = Booking(ray, config)
            # Decided here for all: a node may have GPUs that this runtime has not booked.
            self._start(dataclasses.replace(config, device=self._booking.device))
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.RayError):
                raise LaunchError(f"launcher=ray: {first_line(error)}") from error
            raise

    def _launch(self, index: int) -> None:
        actor_class = self._ray.remote(concurrency_groups=LANES)(ReplicaActor)
        actor = actor_class.options(max_restarts=MAX_RESTARTS, **self._booking.options(index)).remote(self._config)
        serve = actor.serve.options(num_returns="streaming", concurrency_group="serve")
        self._actors[index], self._streams[index] = actor, serve.remote()

    def _place(self, index: int) -> Place:
        return self._booking.place(index)

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
            # Pickled here as Ray would, so that the replica can say so if it cannot be read there.
            actor.post.options(concurrency_group="post").remote(self._ray.cloudpickle.dumps(message))

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
        if self._booking is not None:
            self._booking.release()
            self._booking = None
        if self._connected_here:
            ray.shutdown()
