"""What replicas agree on when they form a group."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from support.stand_ins import KERNELS

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.engine import replica
from lp_runtime.engine.loading import not_captured
from lp_runtime.model import cuda_graph, self_check


@pytest.mark.parametrize(("exactness", "is_kept"), [("strict", False), ("fast", True)])
def test_strict_passes_are_captured_on_all_replicas_or_on_none(exactness, is_kept, monkeypatch, caplog):
    """Other kernels compute other bits; of a peer without captured passes the row of the exchange says so."""
    monkeypatch.setattr(self_check, "STRICT_LENGTHS", (20,))
    monkeypatch.setattr(cuda_graph, "kernels_for", lambda device: KERNELS)
    config = RuntimeConfig(device="cpu", dtype="float32", exactness=exactness, strict_tokens=16, cache_dir=None)
    loaded = replica.load_replica(config, 0, 1, owns_process=False)
    loaded.model.enable_graphs(capture=False)
    gather = replica.gather_rows
    monkeypatch.setattr(
        replica, "gather_rows", lambda row, group: np.concatenate([gather(row, group), [[*row[:2], 0]]])
    )
    with (
        caplog.at_level(logging.WARNING),
        replica.join_group(config, loaded, ReplicaContext(owns_process=False)) as own,
    ):
        assert (loaded.model.graphs is not None) == is_kept == own.info.supports_batching
        assert own.info.not_captured is None  # on a CPU
    assert ("as another replica cannot capture its passes" in caplog.text) != is_kept


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
def test_why_passes_are_not_captured(is_captured, on_gpu, captured, expected):
    timer, graphs = (object() if on_gpu[0] else None), (object() if is_captured else None)
    model = SimpleNamespace(timer=timer, graphs=graphs, why_not_captured=None if is_captured else "why")
    assert not_captured(model, on_gpu, captured) == expected
