"""Tests of launcher=ray on several simulated nodes: placement of replicas, and the loss of a node."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import reference
from support.processes import MARK, PATIENCE, RAY_SETTINGS, marked, wait_until
from support.ranks import interfaces

from lp_runtime import LauncherConfig, LookaheadConfig, LookaheadRuntime
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.store import address_of
from lp_runtime.errors import ConfigError, LaunchError
from lp_runtime.launchers import ray_booking
from lp_runtime.launchers.ray_booking import Booking, device_index
from lp_runtime.launchers.ray_launcher import ReplicaActor
from lp_runtime.launchers.worker.process_host import Placement

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # in CI, test_ray_launcher.py and test_launch_headers.py test Ray

LENGTH = 400
HEALTH = {  # a lost node is noticed after some seconds (by default 15), but later than its lost replica
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}


@pytest.fixture(scope="module")
def cluster():
    """Yield a cluster to which this process is connected.

    The head has no capacity for replicas. Two nodes, also on this machine, have two simulated GPUs each.
    """
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="lpr", dir="/tmp")  # short: Ray puts sockets in it
    with marked(RAY_TMPDIR=folder, **RAY_SETTINGS) as mark, pytest.MonkeyPatch.context() as patch:
        for name in (MARK, "RAY_TMPDIR", *RAY_SETTINGS):
            patch.setenv(name, mark.environment[name])
        patch.delenv("RAY_ADDRESS", raising=False)
        # None takes any free port; the default one may be in use by another cluster.
        small = {"object_store_memory": 80_000_000, "include_dashboard": False, "dashboard_agent_listen_port": None}
        cluster = Cluster(
            initialize_head=True, head_node_args=small | {"num_cpus": 0, "num_gpus": 0, "_system_config": HEALTH}
        )
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, num_gpus=2, **small)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            mark.kill()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def booked(placement: str, gpus: int, start_timeout: float = PATIENCE, num_shards: int = 1) -> Iterator[Booking]:
    """Yield a booking that is released in any case."""
    launcher = LauncherConfig(name="ray", placement=placement, start_timeout=start_timeout)
    booking = Booking(ray, RuntimeConfig(gpus=gpus, gpus_per_replica=num_shards, device="cuda", launcher=launcher))
    try:
        yield booking
    finally:
        booking.release()


@pytest.fixture
def free_cluster(cluster) -> None:
    """Wait until the head has reported all four GPUs as free for some time.

    It learns late and out of order which GPUs were released, and regards a node as full until then.
    """

    def is_free() -> bool:
        time.sleep(0.1)  # the interval at which nodes report
        return ray.available_resources().get("GPU") == 4

    wait_until(lambda: all(is_free() for _ in range(8)))


@pytest.mark.usefixtures("free_cluster")
@pytest.mark.parametrize(
    ("placement", "gpus", "counts"),
    [("pack", 2, [2]), ("pack", 3, [2, 1]), ("spread", 2, [1, 1]), ("spread", 3, [2, 1]), ("spread", 4, [2, 2])],
)
def test_placement_packs_or_spreads_replicas(placement, gpus, counts):
    with booked(placement, gpus) as booking:
        assert sorted(Counter(booking.nodes()).values(), reverse=True) == counts


@pytest.mark.usefixtures("free_cluster")
def test_shards_of_a_replica_share_a_node():
    with booked("pack", 4, num_shards=2) as booking:
        first, second = booking.nodes()
        assert first != second  # a node has two GPUs
        assert booking.options(1)["num_gpus"] == 1  # per actor, which is one shard
        with pytest.raises(ConfigError, match="gpus=6: the Ray cluster has 4"), booked("pack", 6, num_shards=2):
            pass
    message = "gpus=3 gpus_per_replica=3: the nodes of the Ray cluster have GPUs for 0 of 1 replicas"
    with pytest.raises(ConfigError, match=message), booked("pack", 3, num_shards=3):
        pass


@pytest.mark.usefixtures("free_cluster")
def test_wait_for_busy_gpus_is_logged_and_ends(monkeypatch, caplog):
    monkeypatch.setattr(ray_booking, "NOTICE_SECONDS", 0.1)
    with booked("pack", 4), pytest.raises(LaunchError, match="no capacity for 1 x"), booked("pack", 1, 0.5):
        pass
    assert "launcher=ray: waiting up to 0.5 seconds for free capacity of the cluster" in caplog.messages


NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.usefixtures("free_cluster")
@pytest.mark.parametrize(
    ("environment", "device_indices"),
    [
        pytest.param({}, [0, 0], marks=pytest.mark.slow),
        pytest.param(NOSET, [0, 1], marks=pytest.mark.slow),
        pytest.param(NOSET | {"CUDA_VISIBLE_DEVICES": "7,GPU-5d2f"}, [0, 1], marks=pytest.mark.slow),
    ],
)
def test_replica_uses_the_gpu_assigned_by_ray(environment, device_indices):
    """A replica sees one GPU or all GPUs of its node, and in both cases does not share its GPU's memory."""

    def look(_) -> Placement:
        return Booking.placement_here()

    with booked("pack", 2) as booking:
        options = [booking.options(index) | {"runtime_env": {"env_vars": environment}} for index in range(2)]
        actors = [ray.remote(ReplicaActor).options(**each).remote(RuntimeConfig()) for each in options]
        try:
            actual = ray.get([actor.__ray_call__.remote(look) for actor in actors], timeout=PATIENCE)
        finally:
            for actor in actors:
                ray.kill(actor)
    assert sorted(each.device_index for each in actual) == device_indices
    assert all(each == Placement(each.device_index, 2, owns_device=True) for each in actual)


def test_gpu_hidden_by_cuda_visible_devices_is_refused():
    with pytest.raises(LaunchError, match="Ray assigned GPU 3, which CUDA_VISIBLE_DEVICES=0,1 hides"):
        device_index(3, ["0", "1"])


@pytest.mark.usefixtures("free_cluster")
def test_booking_without_capacity_is_refused_and_holds_nothing():
    refusal = r"no capacity for 2 x .*GPU.* within launcher.start_timeout=1 seconds"
    with booked("pack", 3), pytest.raises(LaunchError, match=refusal), booked("pack", 2, start_timeout=1.0):
        pass
    with booked("pack", 4):  # a refused booking holds nothing
        pass


def seen_by_actors(runtime: LookaheadRuntime) -> dict[int, tuple[str, int]]:
    """Return each replica's node id and the number of replicas that it counts on that node."""

    def look(_) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), Booking.placement_here().num_local

    return {index: ray.get(actor.__ray_call__.remote(look)) for index, actor in runtime.launcher.host.actors.items()}


@pytest.mark.slow
def test_lost_shard_restarts_only_its_replica(cluster, demo_model_dir, greedy):
    """A lost shard takes its replica with it and no other, and both shards come back."""
    options = {"device": "cpu", "dtype": "float32", "lookahead": LookaheadConfig(7, 5, 7, prior="none")}
    launcher = LauncherConfig(name="ray", placement="spread")
    with LookaheadRuntime(str(demo_model_dir), 4, launcher, gpus_per_replica=2, **options) as runtime:
        nodes = [node for _, (node, _) in sorted(seen_by_actors(runtime).items())]
        assert runtime.num_replicas == 2 and nodes[0] == nodes[1] != nodes[2] == nodes[3]
        before = dict(runtime.launcher.host.actors)
        stream = runtime.stream(reference.PROMPTS[1], reference.MAX_NEW_TOKENS, eos=False)
        for number, _ in enumerate(stream):
            if number == 2:
                ray.kill(before[3])
        assert stream.generation.token_ids == greedy[1] and stream.generation.losses == 1
        wait_until(lambda: runtime.launcher.num_ready == 2)
        after = runtime.launcher.host.actors
        assert [number for number in range(4) if after[number] is not before[number]] == [2, 3]
        assert runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False).token_ids == greedy[0]


@pytest.mark.slow
def test_replica_of_a_lost_node_restarts_on_another_node(cluster, demo_model_dir, greedy):
    """The remaining replica finishes with the same tokens, and the lost one restarts on the other node."""
    interface = interfaces()[-1]
    options = {"device": "cpu", "dtype": "float32", "lookahead": LookaheadConfig(7, 5, 7, prior="none")}
    launcher = LauncherConfig(name="ray", placement="spread", interface=interface)
    with LookaheadRuntime(str(demo_model_dir), gpus=2, launcher=launcher, **options) as runtime:
        before = seen_by_actors(runtime)
        assert len({node for node, _ in before.values()}) == 2
        assert [num_local for _, num_local in before.values()] == [1, 1]
        assert runtime.launcher.host.rendezvous([0, 1]).host == address_of(interface)
        expected = runtime.generate(reference.PROMPTS[1], LENGTH, eos=False)
        assert expected.token_ids[: reference.MAX_NEW_TOKENS] == greedy[1]
        assert expected.losses == 0

        tokens = []
        stream = runtime.stream(reference.PROMPTS[1], LENGTH, eos=False)
        for number, delta in enumerate(stream):
            tokens += delta.token_ids
            if number == 3:
                (victim,) = [node for node in cluster.worker_nodes if node.node_id == before[0][0]]
                cluster.remove_node(victim, allow_graceful=False)
        assert tokens == expected.token_ids
        assert stream.generation.losses == 1

        wait_until(lambda: runtime.launcher.num_ready == 2)
        after = seen_by_actors(runtime)
        assert after == dict.fromkeys((0, 1), (before[1][0], 2))
        again = runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False)
        assert again.token_ids == greedy[0] and again.exchange_bytes > 0
        assert runtime.launcher.pool.num_restarts == {0: 1, 1: 0}
