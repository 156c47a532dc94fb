"""What replicas agree on when they form a group."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.stand_ins import KERNELS

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.engine import replica
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
    assert ("as another replica cannot capture its passes" in caplog.text) != is_kept
