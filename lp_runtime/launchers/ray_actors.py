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
from collections import Counter
from collections.abc import Generator

from lp_runtime.config import RuntimeConfig
from lp_runtime.decoding import Event, Report, Request
from lp_runtime.errors import ConfigError, LaunchError, ReplicaError, first_line
from lp_runtime.launchers.base import Launcher
from lp_runtime.launchers.messages import Failed, Ready, first_cause
from lp_runtime.parallel.group import ReplicaContext, host_store
from lp_runtime.worker import ReplicaInfo, start_replica

# A replica on CPUs shares the cores with its peers, so it books next to nothing: Ray would refuse gpus=4 on 2 cores.
CPU_SHARE = 0.01
BATCH_SECONDS = 0.005  # runs of tokens that come closer together travel to the driver together
CONNECT_SECONDS = 10.0
GRACE = 1.0  # seconds in which a failure's cause may arrive after its consequence


class ReplicaActor:
    """One replica in a Ray actor. Its methods return messages and never raise: a Failed is an answer too."""

    def __init__(self, config: RuntimeConfig, rank: int):
        self._config = config
        self._rank = rank
        self._stack = contextlib.ExitStack()
        self._store = None
        self._replica = None
        self._cancelled = threading.Event()

    def node(self) -> str:
        """The id of the Ray node this actor runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def host(self, port: int) -> tuple[str, int] | Failed:
        """Open the store that the replicas meet in; returns its address. For rank 0."""
        import ray

        try:
            address = ray.util.get_node_ip_address()
            self._store = host_store(address, port, self._config.launcher.start_timeout)
            return address, self._store.port
        except Exception as error:
            return Failed.from_error(self._rank, error)

    def start(self, context: ReplicaContext) -> Ready | Failed:
        """Load, check and connect."""
        try:
            self._replica = self._stack.enter_context(start_replica(self._config, context, self._store))
            return Ready(self._replica.info)
        except Exception as error:
            return Failed.from_error(self._rank, error)

    def follow(self, request: Request) -> Failed | None:
        """Decode a request without streaming it. For every rank but 0."""
        try:
            for _ in self._replica.decode(request):
                pass
        except Exception as error:
            return Failed.from_error(self._rank, error)
        return None

    def lead(self, request: Request) -> Generator[list[Event | Failed], None, None]:
        """Decode a request and stream its events in small batches. For rank 0.

        The loop runs in a thread of its own, so that sending to the driver is never inside a step.
        """
        events: queue.Queue[Event | Failed] = queue.Queue()
        self._cancelled.clear()

        def decode() -> None:
            try:
                for event in self._replica.decode(request, self._cancelled.is_set):
                    events.put(event)
            except Exception as error:
                events.put(Failed.from_error(self._rank, error))

        threading.Thread(target=decode, daemon=True).start()
        last = None
        while not isinstance(last, Report | Failed):
            batch = [events.get()]
            time.sleep(BATCH_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(events.get_nowait())
            last = batch[-1]
            yield batch

    def cancel(self) -> None:
        """Stop the request that `lead` is decoding, at the end of its step."""
        self._cancelled.set()


class RayLauncher(Launcher):
    """launcher=ray: a placement group, one actor a GPU, the process group formed among the actors."""

    def __init__(self, config: RuntimeConfig):
        try:
            import ray
        except ImportError as error:
            raise LaunchError("launcher=ray: ray is not installed (pip install 'lp-runtime[ray]')") from error
        self._ray = ray
        self.num_replicas = config.gpus or 1
        self._actors: list = []
        self._placement = None
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            self._connect(config.launcher.address)
        try:
            self.info = self._start(config)
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.RayError):
                raise LaunchError(f"launcher=ray: {first_line(error)}") from error
            raise

    def _connect(self, address: str | None) -> None:
        self._probe(address)
        options = {} if address else {"include_dashboard": False}  # the latter is for a cluster that starts here
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and more
            where = f" at launcher.address={address}" if address else ""
            raise LaunchError(
                f"launcher=ray: cannot reach or start a Ray cluster{where}: {first_line(error)}"
            ) from error

    @staticmethod
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

    def _start(self, config: RuntimeConfig) -> ReplicaInfo:
        ray, launcher = self._ray, config.launcher
        self._start_timeout = launcher.start_timeout
        deadline = time.monotonic() + launcher.start_timeout
        cluster = ray.cluster_resources()
        num_gpus = int(cluster.get("GPU", 0))
        on_gpus = config.device == "cuda" or (config.device == "auto" and num_gpus > 0)
        if on_gpus and self.num_replicas > num_gpus:
            raise ConfigError(f"gpus={self.num_replicas}: the Ray cluster has {num_gpus} (on CPUs: device=cpu)")
        # Cores are for what feeds a GPU; a cluster may have fewer than one to spare for each.
        bundle = {"GPU": 1.0, "CPU": CPU_SHARE} if on_gpus else {"CPU": CPU_SHARE}
        self._placement = ray.util.placement_group([bundle] * self.num_replicas, strategy="PACK")
        if not self._placement.wait(launcher.start_timeout):
            raise LaunchError(
                f"launcher=ray: the cluster has no room for {self.num_replicas} x {bundle}"
                f" within launcher.start_timeout={launcher.start_timeout:g} seconds"
            )
        # Decided here for all: a node may have GPUs that this runtime has not booked.
        config = dataclasses.replace(config, device="cuda" if on_gpus else "cpu")
        actor_class = ray.remote(ReplicaActor)
        for rank in range(self.num_replicas):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=rank
            )
            options = {"num_cpus": CPU_SHARE, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
            self._actors.append(actor_class.options(max_concurrency=4, **options).remote(config, rank))
        nodes = self._await_start([actor.node.remote() for actor in self._actors], deadline)
        (address,) = self._await_start([self._actors[0].host.remote(launcher.port)], deadline)
        per_node = Counter(nodes)
        starting = [
            actor.start.remote(ReplicaContext(rank, self.num_replicas, 0, per_node[nodes[rank]], *address))
            for rank, actor in enumerate(self._actors)
        ]
        return self._await_start(starting, deadline)[0].info

    def _await_start(self, refs: list, deadline: float) -> list:
        """The answers of a list of calls, one a rank from 0 on, made while the actors start."""
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        answers = [None] * len(refs)
        while ranks:
            done, _ = self._ray.wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                rank = min(ranks.values())
                raise LaunchError(
                    f"rank {rank} was not ready within launcher.start_timeout={self._start_timeout:g} seconds"
                )
            rank = ranks[done[0]]
            answers[rank] = self._take(ranks, done[0], "at start")[0]
        return answers

    def _run(self, request: Request) -> Generator[Event, None, None]:
        working = {actor.follow.remote(request): rank for rank, actor in enumerate(self._actors) if rank}
        working[self._actors[0].lead.options(num_returns="streaming").remote(request)] = 0
        try:
            while working:
                yield from self._take_next(working, "while decoding")
        except GeneratorExit:  # the caller stopped early
            if self._actors:  # and did not close the launcher first
                self._answer(self._actors[0].cancel.remote(), 0)  # if it is dead, that shows below
                while working:
                    self._take_next(working, "while cancelling")
            raise

    def _take_next(self, working: dict, when: str) -> list[Event]:
        """Wait for any rank, so that a lost one is noticed while its peers still wait for it; rank 0's events."""
        done, _ = self._ray.wait(list(working), num_returns=1)
        return [event for event in self._take(working, done[0], when) if event is not None]

    def _take(self, working: dict, ready, when: str) -> list:
        """What a call that is ready answered. A call that has no more to say leaves `working`.

        Args:
            working: rank by reference of a call, or by the generator of a streaming call.
        """
        messages = self._messages(working, ready)
        failures = [message for message in messages if isinstance(message, Failed)]
        if not failures:
            return messages
        # Of all that is answered within GRACE, the failure that explains the rest.
        deadline = time.monotonic() + GRACE
        while working and (left := deadline - time.monotonic()) > 0:
            done, _ = self._ray.wait(list(working), num_returns=1, timeout=left)
            late = self._messages(working, done[0]) if done else []
            failures += [message for message in late if isinstance(message, Failed)]
        cause = first_cause(failures)
        kind = cause.kind or (LaunchError if when == "at start" else ReplicaError)
        raise kind(f"rank {cause.rank} failed {when}: {cause.message}")

    def _messages(self, working: dict, ready) -> list:
        rank = working[ready]
        if not isinstance(ready, self._ray.ObjectRefGenerator):
            del working[ready]
            return [self._answer(ready, rank)]
        try:
            batch = self._answer(next(ready), rank)
        except StopIteration:
            del working[ready]
            return []
        return [batch] if isinstance(batch, Failed) else batch

    def _answer(self, ref, rank: int):
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            # A process that was lost has nothing to say; one that could not make its actor ends with the reason.
            lines = str(error).strip().splitlines()
            reason = lines[-1].strip() if "creation task" in lines[0] else type(error).__name__
            return Failed(rank, f"its actor ended ({reason})", None)

    def _close(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)
            self._placement = None
        if self._connected_here:
            ray.shutdown()
