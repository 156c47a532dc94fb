"""The replicas' placement group in a Ray cluster, and the GPU that Ray assigned to each replica."""

from __future__ import annotations

import logging
from types import ModuleType

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import visible_gpus
from lp_runtime.distributed.shards import ShardPlace
from lp_runtime.errors import ConfigError, LaunchError, first_line
from lp_runtime.launchers.split import free_of_this_machine
from lp_runtime.launchers.worker.process_host import Placement

log = logging.getLogger(__name__)

# A replica on CPUs shares the cores with its peers, so it reserves almost nothing: Ray would refuse gpus=4 on 2 cores.
CPU_SHARE = 0.01
NOTICE_SECONDS = 5.0  # of waiting for capacity, before that is logged


class Booking:
    """Ray placement group with one bundle per replica, in the order of the replica indices.

    The shards of a replica share its bundle, so they are on one node. Ray moves the bundles of a lost node to another
    node once that has the capacity.
    """

    def __init__(self, ray: ModuleType, config: RuntimeConfig):
        self._ray = ray
        num_replicas, launcher = config.num_replicas, config.launcher
        num_gpus, _ = gpus_of_cluster(ray, config.device)
        on_gpus = config.device == "cuda" or num_gpus > 0
        if on_gpus and config.num_gpus > num_gpus:
            raise ConfigError(f"gpus={config.num_gpus}: the Ray cluster has {num_gpus} (on CPUs: device=cpu)")
        # The CPU share is small on GPUs, too: a cluster may have less than one free core per GPU.
        self._shard = {"GPU": float(config.num_stages), "CPU": CPU_SHARE} if on_gpus else {"CPU": CPU_SHARE}
        self._bundle = {name: config.num_shards * amount for name, amount in self._shard.items()}
        self.device = "cuda" if on_gpus else "cpu"  # for all replicas
        if on_gpus and (num_bundles := self._num_possible()) < num_replicas:
            given = f"gpus={config.num_gpus} gpus_per_replica={config.gpus_per_replica}"
            raise ConfigError(
                f"{given}: the nodes of the Ray cluster have GPUs for {num_bundles} of {num_replicas} replicas;"
                " those of a replica are on one node"
            )
        self._group = ray.util.placement_group([self._bundle] * num_replicas, strategy=launcher.placement.upper())
        try:
            if not self._wait(launcher.start_timeout):
                raise LaunchError(
                    f"launcher=ray: the cluster has no capacity for {num_replicas} x {self._bundle}"
                    f" within launcher.start_timeout={launcher.start_timeout:g} seconds"
                )
        except BaseException:  # also if the wait is interrupted (KeyboardInterrupt)
            self.release()
            raise

    def _num_possible(self) -> int:
        """Return how many bundles the GPUs of the cluster's nodes could hold if all were free."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(int(node.get("GPU", 0) // self._bundle["GPU"]) for node in nodes)

    def _wait(self, timeout: float) -> bool:
        """Return whether the cluster has the capacity before `timeout`; log that it is waited for."""
        if timeout > NOTICE_SECONDS:
            if self._group.wait(NOTICE_SECONDS):
                return True
            log.warning("launcher=ray: waiting up to %g seconds for free capacity of the cluster", timeout)
            timeout -= NOTICE_SECONDS
        return bool(self._group.wait(timeout))

    def options(self, index: int) -> dict[str, object]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        return {"num_cpus": CPU_SHARE, "num_gpus": self._shard.get("GPU", 0), "scheduling_strategy": strategy}

    def nodes(self) -> list[str]:
        nodes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [nodes[index] for index in sorted(nodes)]

    @staticmethod
    def placement_here(shard: ShardPlace = ShardPlace()) -> Placement:  # noqa: B008 (it is frozen)
        """Return the placement of the calling actor: which of the visible GPUs Ray assigned to it."""
        import ray

        nodes = ray.util.placement_group_table(ray.util.get_current_placement_group())["bundles_to_node_id"]
        num_local = shard.num_shards * list(nodes.values()).count(ray.get_runtime_context().get_node_id())
        assigned = ray.get_gpu_ids()
        if not assigned:
            return Placement(0, num_local, shard=shard)
        indices = [device_index(each, visible_gpus()) for each in assigned]
        if indices != list(range(indices[0], indices[0] + len(indices))):
            raise LaunchError(
                f"launcher=ray: the replica's GPUs must have consecutive indices, and Ray assigned {indices}"
            )
        return Placement(indices[0], num_local, owns_device=True, shard=shard)

    def release(self) -> None:
        self._ray.util.remove_placement_group(self._group)


def gpus_of_cluster(ray: ModuleType, device: str) -> tuple[int, int]:
    """Return (GPUs of a Ray cluster, GPUs of its smallest node that has any); (0, 0) on CPUs."""
    if device == "cpu":
        return 0, 0
    numbers = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return int(ray.cluster_resources().get("GPU", 0)), min(filter(None, numbers), default=0)


def free_of_one_gpu(ray: ModuleType, config: RuntimeConfig) -> list[int]:
    """Return [free bytes of one GPU of a Ray cluster]; all its GPUs are assumed to have the same memory."""
    task = ray.remote(num_gpus=1, num_cpus=CPU_SHARE, max_retries=0)(free_of_this_machine)
    call = task.remote()
    try:
        (free, *_) = ray.get(call, timeout=config.launcher.start_timeout)
    except ray.exceptions.RayError as error:
        ray.cancel(call, force=True)
        reason = first_line(getattr(error, "cause", None) or error)  # the task's own error, without Ray's traceback
        raise LaunchError(f"launcher=ray: cannot read a GPU's free memory: {reason}") from error
    return [free]


def device_index(assigned: int | str, visible: list[str] | None) -> int:
    """Return the index, among the GPUs that a process sees, of the GPU that Ray assigned to it.

    Ray shows an actor only the assigned GPU, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set: then the actor
    sees all GPUs that its node's Ray sees. `assigned` is an index on the node or a name in CUDA_VISIBLE_DEVICES, and
    `visible` has the names there; None if the process sees all GPUs of its node.
    """
    if visible is None:
        return int(assigned)
    if str(assigned) not in visible:
        raise LaunchError(
            f"launcher=ray: Ray assigned GPU {assigned}, which CUDA_VISIBLE_DEVICES={','.join(visible)} hides"
        )
    return visible.index(str(assigned))
