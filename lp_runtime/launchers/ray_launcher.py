"""Launcher of replicas as Ray actors, one per GPU. Ray is imported only when this launcher is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.process_group import GroupOptions, new_segment_name
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.distributed.store import address_of, host_store
from lp_runtime.errors import LaunchError, first_line
from lp_runtime.launchers.ray_booking import Booking, free_of_one_gpu, gpus_of_cluster
from lp_runtime.launchers.ray_connection import check_connected, connect
from lp_runtime.launchers.split import choose_split
from lp_runtime.launchers.team import TeamLauncher
from lp_runtime.launchers.wire.messages import Failed, decode_order, encode_order
from lp_runtime.launchers.worker.process_host import ProcessHost
from lp_runtime.launchers.worker.replica_server import FollowerServer, ReplicaServer

BATCH_SECONDS = 0.005  # step outputs that are closer together are sent to the driver in one batch
STORE_SECONDS = 10.0  # limit for a replica to open a store
MAX_RESTARTS = 1  # by Ray, if the node is lost before the actor runs; later the pool kills it when its stream ends
CLIENT = (
    "launcher=ray: not through Ray Client (ray://), which has no streams of messages: run on a node of the cluster,"
    " with launcher.address=HOST:6379, or submit a job (launch/ray_job.sh)"
)
DISCONNECTED = "the program has ended its connection to Ray"
CONCURRENCY_GROUPS = {"serve": 1, "post": 1, "host": 1}  # one thread each: calls of a group run one after another


class ReplicaActor:
    """One replica, or one shard of a replica, in a Ray actor."""

    def __init__(self, config: RuntimeConfig, shard: ShardPlace | None = None):
        self.outgoing: queue.Queue[object] = queue.Queue()  # messages to the driver; None comes last
        self._config, self._shard = config, shard or ShardPlace()
        self._server: ReplicaServer | FollowerServer | None = None
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]  # torch does not re-export it

    def serve(self) -> Iterator[list[object]]:
        """Run the replica in a separate thread; stream its messages in small batches. No step waits for it."""
        # Determined here, not by the driver: a restarted replica may be on another node.
        try:
            place = Booking.placement_here(self._shard)
        except Exception as error:  # Ray would pass on its type only
            yield [Failed.from_error(error)]
            return
        serving = ReplicaServer if self._shard.is_leader else FollowerServer
        server = serving(self._config, place, self.outgoing.put)

        def run() -> None:
            server.run()
            self.outgoing.put(None)

        self._server = server
        threading.Thread(target=run, daemon=True).start()
        batch: list[object] = []
        while None not in batch:
            batch = [self.outgoing.get()]
            time.sleep(BATCH_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self.outgoing.get_nowait())
            yield [message for message in batch if message is not None]

    def post(self, data: bytes) -> None:
        """Pass an encoded message of the driver to the replica, which must have sent a message before."""
        try:
            message = decode_order(data)
        except LaunchError as error:  # e.g. from another version of this package
            self.outgoing.put(Failed.from_error(error))
            self.outgoing.put(None)
        else:
            assert self._server is not None
            self._server.post(message)

    def open_rendezvous(self, num_local: int) -> ReplicaContext | Failed:
        """Create the meeting point of a group whose rank 0 is this replica; Failed says why it cannot.

        `num_local` is the size of the group if all its replicas are on this machine, else 0.
        """
        import ray

        try:
            launcher = self._config.launcher
            options = GroupOptions(launcher.timeout, backend=launcher.backend, interface=launcher.interface)
            if num_local and options.shares_memory(num_local):
                return ReplicaContext(segment=new_segment_name())
            address = ray.util.get_node_ip_address() if launcher.interface is None else address_of(launcher.interface)
            if self._store is None:
                self._store = host_store(address, launcher.port, launcher.start_timeout)
            return ReplicaContext(host=address, port=self._store.port)
        except Exception as error:
            return Failed.from_error(error)


class RayHost(ProcessHost):
    """Replicas as actors of a Ray cluster, to which this connects: a placement group, one actor per shard."""

    def __init__(self, ray: ModuleType, config: RuntimeConfig):
        self.actors: dict[int, Any] = {}  # the latest ones that this host has not killed, by number
        self._ray = ray
        self._streams: dict[int, Any] = {}  # of each actor's messages, by number
        self._ended_streams: list[Any] = []
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            connect(config.launcher.address)
        try:
            if ray.util.client.ray.is_connected():
                raise LaunchError(CLIENT)
            if not self._connected_here:
                check_connected(ray.get_runtime_context().gcs_address, config.launcher.address)
            # Another object after another ray.init; None if the connection ended while a thread was waiting.
            self._connection: object = ray.get_runtime_context().worker.core_worker
            num_gpus, num_local = gpus_of_cluster(ray, config.device)
            config = choose_split(config, num_gpus, lambda: free_of_one_gpu(ray, config), num_local)
            self._booking = Booking(ray, config)
        except BaseException:
            self._disconnect()
            raise
        # Set for all replicas: with "auto", one would use GPUs of its node that this runtime has not reserved.
        self.config = dataclasses.replace(config, device=self._booking.device)
        self.num_shards = config.num_shards

    @property
    def _is_connected(self) -> bool:
        """Whether the actors can be reached; without a connection, most calls of Ray would start a new cluster."""
        if self._connection is None or not self._ray.is_initialized():
            return False
        return getattr(self._ray.get_runtime_context().worker, "core_worker", None) is self._connection

    def start_process(self, index: int) -> None:
        if not self._is_connected:
            raise LaunchError(f"launcher=ray: {DISCONNECTED}")
        actor_class = self._ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(ReplicaActor)
        options, segment = self._booking.options(index), new_segment_name()
        for number in self.numbers(index):
            shard = ShardPlace(number % self.num_shards, self.num_shards, segment, self.config.failure.timeout)
            actor = actor_class.options(max_restarts=MAX_RESTARTS, **options).remote(self.config, shard)
            serve = actor.serve.options(num_returns="streaming", concurrency_group="serve")
            self.actors[number], self._streams[number] = actor, serve.remote()

    def rendezvous(self, members: Sequence[int]) -> ReplicaContext | None:
        leader = members[0]
        actor = self.actors.get(self.numbers(leader)[0])
        if actor is None or not self._is_connected:
            return None
        nodes = self._booking.nodes()
        num_nodes = len({nodes[index] for index in members})
        if self.config.launcher.backend == "shared" and num_nodes > 1:
            raise LaunchError(f"launcher.backend=shared: the replicas are on {num_nodes} machines")
        open_rendezvous = actor.open_rendezvous.options(concurrency_group="host")
        call = open_rendezvous.remote(len(members) if num_nodes == 1 else 0)
        try:
            answer = self._ray.get(call, timeout=STORE_SECONDS)
        except self._ray.exceptions.RayError:
            return None
        if isinstance(answer, Failed):
            raise (answer.kind or LaunchError)(f"rank {leader}: {answer.message}")
        return answer

    def send(self, index: int, message: object) -> None:
        actor = self.actors.get(self.numbers(index)[0])
        if actor is not None and self._is_connected:
            actor.post.options(concurrency_group="post").remote(encode_order(message))

    def pickled(self, value: object) -> bytes:
        return self._ray.cloudpickle.dumps(value)

    def receive(self, timeout: float) -> list[tuple[int, object]]:
        numbers = {stream: number for number, stream in list(self._streams.items())}
        if not numbers:
            time.sleep(timeout)
            return []
        ready: list[Any] = []
        try:
            if self._is_connected:
                ready, _ = self._ray.wait(list(numbers), num_returns=1, timeout=timeout)
        except SystemExit:  # raised by Ray if the connection ends during the wait; it would end this thread
            self._connection = None
        if not self._is_connected:
            self._ended_streams += numbers  # Ray ends the process if one is freed while the connection ends
            self._streams = {}
            lost = {number // self.num_shards for number in numbers.values()}
            return [(index, Failed(DISCONNECTED)) for index in sorted(lost)]
        messages = []
        for stream in ready:
            number = numbers[stream]
            try:
                batch = self._ray.get(next(stream))
            except (self._ray.exceptions.RayError, StopIteration) as error:
                batch = [Failed(f"its actor ended ({self._reason(error)})")]
            if self._streams.get(number) is not stream:  # `kill` was called meanwhile
                continue
            if batch and isinstance(batch[-1], Failed):  # the last message of the stream, or made from its end above
                self._streams.pop(number, None)
            messages += [(number // self.num_shards, message) for message in batch]
        return messages

    @staticmethod
    def _reason(error: Exception) -> str:
        # An actor that could not be created has its reason in the last line; for a lost process the type says enough.
        lines = str(error).strip().splitlines()
        is_explained = lines and any(words in lines[0] for words in ("creation task", "runtime environment"))
        return lines[-1].strip() if is_explained else type(error).__name__

    def kill(self, index: int) -> Callable[[], None]:
        numbers = self.numbers(index)
        for number in numbers:
            self._streams.pop(number, None)
        actors = [self.actors.pop(number) for number in numbers if number in self.actors]

        def end() -> None:  # calls the cluster, which may answer slowly
            for actor in actors if self._is_connected else ():
                self._ray.kill(actor)

        return end

    def close(self) -> None:
        if not self._is_connected:  # the actors have ended with the connection
            return
        for actor in self.actors.values():
            self._ray.kill(actor)
        self.actors, self._streams = {}, {}
        self._booking.release()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connected_here:
            self._ray.shutdown()


class RayLauncher(TeamLauncher):
    """launcher=ray: replicas as actors of a Ray cluster."""

    def __init__(self, config: RuntimeConfig):
        try:
            import ray
        except ImportError as error:
            raise LaunchError("launcher=ray: ray is not installed (pip install 'lp-runtime[ray]')") from error
        try:
            self.host = RayHost(ray, config)
            super().__init__(self.host.config, self.host)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"launcher=ray: {first_line(error)}") from error
