"""Tests of launcher=ray: actors on a cluster started with `ray start --head`, and a local cluster."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from support import reference
from support.examples import load_example
from support.processes import RAY_SETTINGS, command_line, marked, run_cli, wait_until
from support.ray_head import head_node

from lp_runtime import LauncherConfig, LookaheadConfig, LookaheadRuntime
from lp_runtime.config.settings import FailureConfig, ModelConfig, RuntimeConfig
from lp_runtime.errors import ConfigError, LaunchError
from lp_runtime.launchers import ray_connection, ray_launcher
from lp_runtime.launchers.ray_booking import Booking
from lp_runtime.launchers.ray_launcher import RayHost, ReplicaActor
from lp_runtime.launchers.wire.messages import Failed

FIXED = LookaheadConfig(15, 5, 15, prior="none")  # fixed, so nothing is measured at start

ray = pytest.importorskip("ray")
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module")
def cluster():
    with head_node(has_dashboard=False, **RAY_SETTINGS) as head:
        yield head


def launcher(cluster) -> LauncherConfig:
    return LauncherConfig(name="ray", address=cluster.address)


def actors(cluster) -> list[int]:
    return [pid for pid in cluster.alive() if command_line(pid).startswith("ray::ReplicaActor")]


@pytest.fixture(scope="module")
def runtime(cluster, demo_model_dir):
    """Yield a runtime with two replicas as actors."""
    with LookaheadRuntime(
        str(demo_model_dir), gpus=2, launcher=launcher(cluster), device="cpu", dtype="float32", lookahead=FIXED
    ) as runtime:
        yield runtime
    wait_until(lambda: not actors(cluster))


def test_output_matches_transformers_generate(runtime, greedy):
    assert runtime.num_replicas == 2
    for number, setting in enumerate([FIXED, replace(FIXED, W=5, N=3, G=5)]):
        prompt, expected = reference.PROMPTS[number], greedy[number]
        out = runtime.generate(prompt, reference.MAX_NEW_TOKENS, eos=False, lookahead=setting)
        assert out.token_ids == expected, (setting, prompt)
        assert out.steps < reference.MAX_NEW_TOKENS


def test_stream_yields_deltas_and_can_be_closed_early(runtime, greedy):
    stream = runtime.stream(reference.PROMPTS[0], 2000, eos=False)
    seen = next(stream).token_ids + next(stream).token_ids
    stream.close()
    assert seen[: len(greedy[0])] == greedy[0][: len(seen)]
    deltas = list(runtime.stream(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False))
    assert [token for delta in deltas for token in delta.token_ids] == greedy[0]


@pytest.mark.slow
def test_sampling_matches_one_token_per_step(runtime, sampled):
    out = runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False, sampling=reference.SAMPLING)
    assert out.token_ids == sampled
    assert out.steps < len(sampled)


@pytest.mark.slow
def test_example_runs_on_two_replicas(cluster, capsys):
    load_example("ray_job").main(2, cluster.address)
    assert capsys.readouterr().out.splitlines()[-1].endswith(" steps on 2 replicas")


def test_replicas_are_actors(runtime, cluster):
    wait_until(lambda: len(actors(cluster)) == 2)  # actors of other tests may still be ending


def test_more_replicas_than_cluster_gpus_are_refused(runtime, cluster, demo_model_dir):
    with pytest.raises(ConfigError, match="gpus=3: the Ray cluster has 0"):
        LookaheadRuntime(str(demo_model_dir), gpus=3, launcher=launcher(cluster), device="cuda")
    wait_until(lambda: len(actors(cluster)) == 2)


@pytest.mark.slow
def test_replica_that_fails_at_start_is_named(runtime, cluster, tiny_model_dir, tmp_path):
    broken = shutil.copytree(tiny_model_dir, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(Exception, match=r"rank \d failed at start: model.path=.*: cannot be loaded"):
        LookaheadRuntime(str(broken), gpus=2, launcher=launcher(cluster), device="cpu")
    wait_until(lambda: len(actors(cluster)) == 2)


@pytest.mark.slow
def test_port_in_use_is_refused(runtime, cluster, tiny_model_dir):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        config = LauncherConfig(name="ray", address=cluster.address, port=port, backend="gloo")
        with pytest.raises(LaunchError, match=f"rank 0: cannot listen on .*:{port}"):
            LookaheadRuntime(str(tiny_model_dir), gpus=2, launcher=config, device="cpu")


@pytest.mark.slow
def test_killed_and_hanging_replicas_are_restarted(cluster, runtime, demo_model_dir):
    """The remaining replicas finish with the same tokens as without a loss; Ray restarts the lost ones."""
    expected = runtime.generate(reference.PROMPTS[1], 300, eos=False).token_ids
    before = actors(cluster)
    config = RuntimeConfig(
        model=ModelConfig(path=str(demo_model_dir)),
        gpus=2,
        launcher=launcher(cluster),
        failure=FailureConfig(timeout=3.0),
        device="cpu",
        dtype="float32",
        lookahead=FIXED,
    )
    with LookaheadRuntime.from_config(config) as disturbed:
        team = disturbed.launcher

        def stop() -> None:
            os.kill(min(set(actors(cluster)) - set(before)), signal.SIGSTOP)

        for harm in (lambda: ray.kill(team.host.actors[0]), stop):
            tokens = []
            stream = disturbed.stream(reference.PROMPTS[1], 300, eos=False)
            for number, delta in enumerate(stream):
                tokens += delta.token_ids
                if number == 3:
                    harm()
            assert tokens == expected and stream.generation.losses == 1
            wait_until(lambda: not team.num_loading)
            assert len(set(actors(cluster)) - set(before)) == 2
    wait_until(lambda: set(actors(cluster)) <= set(before))


@pytest.mark.slow
def test_local_cluster_is_started_and_stopped(demo_model_dir, tmp_path):
    folder = tempfile.mkdtemp(prefix="lpr", dir="/tmp")
    with marked(RAY_TMPDIR=folder, **RAY_SETTINGS) as mark:
        mark.environment.pop("RAY_ADDRESS", None)
        overrides = ["prompt=def f():", "launcher=ray", "gpus=2", "device=cpu", "max_new_tokens=8", "eos=false"]
        result = run_cli(f"model.path={demo_model_dir}", *overrides, cwd=tmp_path, environment=mark.environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("def f():")
        assert "2 replicas on cpu" in result.stderr
        mark.assert_gone()
    shutil.rmtree(folder, ignore_errors=True)


def test_unreadable_message_ends_the_replica_with_a_reason():
    actor = ReplicaActor(RuntimeConfig())
    actor.post(b"no pickle")
    failed = actor.outgoing.get_nowait()
    assert isinstance(failed, Failed) and "an order of the driver cannot be read" in failed.message
    assert actor.outgoing.get_nowait() is None


def test_actor_reports_why_it_cannot_use_its_gpus(monkeypatch):
    reason = "launcher=ray: the replica's GPUs must have consecutive indices, and Ray assigned [0, 2]"

    def refuse(shard) -> None:
        raise LaunchError(reason)

    monkeypatch.setattr(ray_launcher.Booking, "placement_here", refuse)
    assert list(ReplicaActor(RuntimeConfig()).serve()) == [[Failed.from_error(LaunchError(reason))]]


@pytest.fixture
def host(monkeypatch) -> RayHost:
    """A host of two replicas, on a module `ray` whose functions do nothing."""
    module = MagicMock(wait=lambda streams, num_returns, timeout: (streams, []), get=lambda batch: batch)
    module.exceptions.RayError = ray.exceptions.RayError
    module.util.client.ray.is_connected.return_value = False
    monkeypatch.setattr(ray_launcher, "gpus_of_cluster", lambda ray, device: (0, 1))
    monkeypatch.setattr(
        ray_launcher, "Booking", lambda ray, config: SimpleNamespace(device="cpu", options=lambda index: {})
    )
    return RayHost(module, RuntimeConfig(gpus=2, device="cpu"))


def test_other_cluster_than_that_of_the_program_is_refused(host):
    host._ray.get_runtime_context.return_value.gcs_address = "127.0.0.2:6379"
    for address in (None, "auto", "127.0.0.2:6379"):
        RayHost(host._ray, RuntimeConfig(launcher=LauncherConfig(name="ray", address=address), device="cpu"))
    with pytest.raises(LaunchError, match="launcher.address=127.0.0.3:6379: this program is connected to .* already"):
        RayHost(host._ray, RuntimeConfig(launcher=LauncherConfig(name="ray", address="127.0.0.3:6379"), device="cpu"))


def test_failed_runtime_environment_is_the_reason_of_an_actor(host):
    def fails(stream):
        raise ray.exceptions.RuntimeEnvSetupError("Could not create the actor.\nTraceback:\nValueError: no conda here")

    host._ray.get = fails
    host.actors, host._streams = {0: MagicMock()}, {0: iter([None])}
    ((index, failed),) = host.receive(0.0)
    assert (index, failed.message) == (0, "its actor ended (ValueError: no conda here)")


def test_actor_that_ends_silently_is_reported_as_failed(host):
    """The last batch of its stream is empty; the replica is lost once the stream has ended."""
    actor = host._ray.remote.return_value.return_value.options.return_value.remote.return_value
    actor.serve.options.return_value.remote.return_value = iter([[]])
    host.start_process(0)
    assert host.receive(0.0) == []
    assert host.receive(0.0) == [(0, Failed("its actor ended (StopIteration)"))]
    assert host.receive(0.0) == []


def small_cluster(has_capacity: Callable[[float], bool]) -> MagicMock:
    """Return a module `ray` of a cluster of two nodes with two GPUs each."""
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}
    module = MagicMock(nodes=lambda: [node, node], cluster_resources=lambda: {"CPU": 16.0, "GPU": 4.0})
    module.util.placement_group.return_value.wait = has_capacity
    return module


@pytest.mark.parametrize(("gpus", "num_shards", "possible"), [(4, 4, "0 of 1"), (3, 3, "0 of 1"), (4, 2, None)])
def test_replica_that_fits_on_no_node_is_refused_at_once(gpus, num_shards, possible):
    module = small_cluster(lambda timeout: True)
    config = RuntimeConfig(gpus=gpus, gpus_per_replica=num_shards, device="cuda")
    if possible is None:
        Booking(module, config)
        return
    with pytest.raises(
        ConfigError, match=f"gpus={gpus} gpus_per_replica={num_shards}: .* GPUs for {possible} replicas"
    ):
        Booking(module, config)
    assert not module.util.placement_group.called


def test_wait_for_capacity_is_logged_and_ends(caplog):
    waits: list[float] = []
    module = small_cluster(lambda timeout: bool(waits.append(timeout)))
    launcher = LauncherConfig(name="ray", start_timeout=60.0)
    with pytest.raises(
        LaunchError, match="the cluster has no capacity for 4 x .* within launcher.start_timeout=60 sec"
    ):
        Booking(module, RuntimeConfig(gpus=4, device="cuda", launcher=launcher))
    assert sum(waits) == 60.0 and module.util.remove_placement_group.called
    assert caplog.messages == ["launcher=ray: waiting up to 60 seconds for free capacity of the cluster"]


def test_port_of_another_service_is_refused(monkeypatch):
    """Ray itself would try for minutes, for example with the port of its dashboard."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_connection, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"launcher=ray: no Ray cluster answers at {address}: give the port of"):
            ray_connection.connect(address)


def test_ray_client_is_refused(host):
    host._ray.util.client.ray.is_connected.return_value = True
    with pytest.raises(LaunchError, match="launcher=ray: not through Ray Client .*: run on a node of the cluster"):
        RayHost(host._ray, RuntimeConfig(gpus=2, device="cpu"))


@pytest.mark.parametrize(
    "end",
    [
        {"is_initialized.return_value": False},
        {"get_runtime_context.return_value": MagicMock()},
        {"wait": MagicMock(side_effect=SystemExit(0))},  # of Ray, if the connection ends meanwhile
    ],
    ids=["ended", "connected_again", "ended_while_waiting"],
)
def test_replicas_are_lost_when_the_program_ends_its_connection(host, end):
    """Also if it has connected again meanwhile. Calls of Ray would start a new cluster."""
    streams = iter([iter([]), iter([])])
    actor = host._ray.remote.return_value.return_value.options.return_value.remote.return_value
    actor.serve.options.return_value.remote.side_effect = lambda: next(streams)
    for index in range(2):
        host.start_process(index)
    host._ray.configure_mock(**{"wait": None, "get": None} | end)  # not to be called
    assert host.receive(0.0) == [(index, Failed("the program has ended its connection to Ray")) for index in range(2)]
    host.send(0, "order")
    assert host.rendezvous((0, 1)) is None
    host.kill(0)()
    with pytest.raises(LaunchError, match="launcher=ray: the program has ended its connection to Ray"):
        host.start_process(0)
    host.close()
    assert not host._ray.kill.called and not actor.post.options.called


def test_processor_of_main_module_is_sent_with_its_class(runtime, monkeypatch):
    """Ray pickles classes by value if replicas cannot import them."""
    body = {"prefix_only": True, "__call__": lambda self, input_ids, scores: scores, "__module__": "__main__"}
    silent = type("Silent", (), body)
    monkeypatch.setattr(sys.modules["__main__"], "Silent", silent, raising=False)
    out = runtime.generate(reference.PROMPTS[0], 4, eos=False, processors=[silent()])
    assert out.token_ids == runtime.generate(reference.PROMPTS[0], 4, eos=False).token_ids
