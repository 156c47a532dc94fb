"""Agreement among replicas when they form a group."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.stand_ins import KERNELS

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.model.checks import self_check
from lp_runtime.model.forward import cuda_graph
from lp_runtime.replica import loaded_model, replica
from lp_runtime.replica.loading import group_not_captured
from lp_runtime.utils import jit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exactness", "is_kept"), [("strict", False), pytest.param("fast", True, marks=pytest.mark.slow)]
)
def test_strict_passes_are_captured_on_all_replicas_or_on_none(exactness, is_kept, monkeypatch, caplog):
    """Other kernels compute other bits, so replicas gather whether each of them captured its passes."""
    monkeypatch.setattr(self_check, "STRICT_LENGTHS", (20,))
    monkeypatch.setattr(cuda_graph, "kernels_for", lambda device: KERNELS)
    config = RuntimeConfig(device="cpu", dtype="float32", exactness=exactness, strict_tokens=16, cache_dir=None)
    loaded = loaded_model.load_replica(config, 0, 1, owns_process=False)
    loaded.model.enable_graphs(capture=False)
    gather = replica.gather_rows
    others = np.array([1, 1, 0, 0, 0])  # the other replica has captured nothing; memory and device are the same
    monkeypatch.setattr(replica, "gather_rows", lambda row, group: np.stack([*gather(row, group), row * others]))
    with (
        caplog.at_level(logging.WARNING),
        replica.join_group(config, loaded, ReplicaContext(owns_process=False)) as own,
    ):
        assert (loaded.model.graphs is not None) == is_kept == own.info.supports_batching
        assert own.info.not_captured is None  # on a CPU
    assert ("because another replica cannot capture its passes" in caplog.text) != is_kept


@pytest.mark.parametrize(
    ("is_captured", "on_gpu", "captured", "expected"),
    [
        (True, [1, 1], [1, 1], None),
        (False, [1, 1], [0, 0], "why"),
        (False, [1, 1], [0, 1], "why"),
        (True, [1, 1], [1, 0], "only on replica 1, which has logged the reason"),
        (False, [0, 0], [0, 0], None),
    ],
)
def test_group_not_captured_returns_own_reason_or_names_replica(is_captured, on_gpu, captured, expected):
    timer, graphs = (object() if on_gpu[0] else None), (object() if is_captured else None)
    model = SimpleNamespace(timer=timer, graphs=graphs, why_no_graphs=None if is_captured else "why")
    assert group_not_captured(model, on_gpu, captured) == expected


@pytest.mark.parametrize("device_index", [0, 1])
def test_one_replica_of_a_machine_reports_code_that_cannot_be_kept(device_index, monkeypatch):
    monkeypatch.setattr(jit.UNSAVED, "is_silent", None)
    config = RuntimeConfig(ModelConfig("/none"), device="cpu", lookahead=LookaheadConfig(drafter="paper"))
    with pytest.raises(ModelError):
        loaded_model.load_replica(config, device_index, 2, owns_process=False)
    assert jit.UNSAVED.is_silent == (device_index > 0)


@pytest.mark.parametrize(("backend", "rank", "owns", "shows"), [("auto", 0, True, True), ("gloo", 2, False, False)])
def test_replica_owns_only_visible_gpu_unless_backend_is_gloo(backend, rank, owns, shows, monkeypatch):
    """The process owns the GPU's memory unless the backend may share GPUs; only rank 0 shows progress."""
    loads = []

    def load(config, device_index, num_local, owns_process, owns_device, place):
        loads.append((owns_device, config.show_progress))
        raise ModelError("enough")

    monkeypatch.setattr(replica, "load_replica", load)
    config = RuntimeConfig(launcher=LauncherConfig(backend=backend), show_progress=True)
    context = ReplicaContext(rank, 4, device_index=0, num_local=4, owns_device=True)
    with pytest.raises(ModelError, match="enough"), replica.start_replica(config, context):
        pass
    assert loads == [(owns, shows)]


def test_two_replicas_on_same_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(replica, "gpu_number", lambda device: 7)
    model = SimpleNamespace(device=torch.device("cuda"), timer=None, graphs=None)
    loaded = SimpleNamespace(model=model, info=SimpleNamespace(capacity=None), early_start=None)
    monkeypatch.setattr(replica, "gather_rows", lambda row, group: np.stack([row, row]))
    context = ReplicaContext(owns_device=True)
    with (
        pytest.raises(ConfigError, match="replicas 0 and 1 have the same GPU"),
        replica.join_group(RuntimeConfig(), loaded, context),
    ):
        pass


@pytest.mark.parametrize(
    ("device", "device_index", "owns_device", "warns"),
    [("cuda", 0, False, 1), ("cuda", 1, False, 0), ("cuda", 0, True, 0), ("cpu", 0, False, 0)],
)
def test_replica_of_first_gpu_warns_of_too_few_cores(device, device_index, owns_device, warns, monkeypatch):
    """There is no warning on CPUs, or if each process may have received separate cores, as from srun."""
    asked: list[int] = []

    def stop(*arguments):
        raise ModelError("enough")

    monkeypatch.setattr(loaded_model, "choose_device", lambda *arguments: torch.device(device, device_index))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(loaded_model, "warn_of_few_cores", asked.append)
    monkeypatch.setattr(loaded_model, "ready_model", stop)
    with pytest.raises(ModelError, match="enough"):
        loaded_model.load_replica(RuntimeConfig(), device_index, 8, False, owns_device)
    assert asked == [8] * warns
