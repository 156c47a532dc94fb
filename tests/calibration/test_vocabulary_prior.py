"""The vocabulary prior, computed within a time limit, over several starts and by several replicas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.ranks import CPU, run_ranks

from lp_runtime.calibration import vocabulary_prior
from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.calibration.vocabulary_prior import FIRST_SLICE_TEXTS, MIN_SLICE_TEXTS
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.top_k import ENTRY, PRIOR_ROWS, K
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.replica import start_replica

SIZE = 700  # tokens of the vocabulary: several slices
FIXED = LookaheadConfig(5, 4, 5)


@pytest.fixture(scope="module")
def folder(make_model_dir) -> Path:
    return make_model_dir(vocab_size=SIZE)


@pytest.fixture
def one_slice(monkeypatch) -> None:
    """Give each start time for only one slice."""
    monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 0.0)


def model_of(folder: Path) -> ModelRunner:
    return ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 2048)


def num_known(entries: np.ndarray) -> tuple[int, int]:
    """Return for how many tokens, and for how many with all likely successors, the prior is known."""
    is_known = entries.reshape(-1, PRIOR_ROWS, ENTRY)[:, :, 0] >= 0
    return int(is_known[:, 0].sum()), int(is_known.all(axis=1).sum())


def test_next_start_continues_prior_from_disk(folder, tmp_path, monkeypatch, one_slice):
    model, results = model_of(folder), []
    num_slices, num_with_pairs = -(-SIZE // FIRST_SLICE_TEXTS), FIRST_SLICE_TEXTS // K
    for _ in range(num_slices + 2):
        results.append(Calibration(model, Group.alone(), str(tmp_path)).vocabulary())
    known = [(FIRST_SLICE_TEXTS * start, 0) for start in range(1, num_slices)]
    assert list(map(num_known, results)) == [*known, (SIZE, 0), (SIZE, num_with_pairs), (SIZE, 2 * num_with_pairs)]
    assert (results[0][::PRIOR_ROWS, 0] >= 0).all()  # the lowest ids first
    assert (results[-1][: 2 * num_with_pairs * PRIOR_ROWS, 0] >= 0).all()
    monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 60.0)
    results.append(Calibration(model, Group.alone(), str(tmp_path)).vocabulary())
    monkeypatch.setattr(ModelRunner, "logits_after_each", None)
    complete = Calibration(model, Group.alone(), str(tmp_path)).vocabulary()
    assert (complete == results[-1]).all()
    monkeypatch.undo()
    monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 60.0)
    at_once = Calibration(model, Group.alone(), None).vocabulary()
    assert (complete[:, :K] == at_once[:, :K]).mean() > 0.99  # up to ties


def test_prior_is_computed_once_per_process(folder, monkeypatch, one_slice):
    model, known = model_of(folder), Measured()
    first = Calibration(model, Group.alone(), None, known).vocabulary()
    monkeypatch.setattr(ModelRunner, "logits_after_each", None)
    assert (Calibration(model, Group.alone(), None, known).vocabulary() == first).all()


def test_lack_of_memory_shrinks_slice_and_then_stops(folder, monkeypatch):
    model, sizes = model_of(folder), []

    def fail(self, slot, branches, text):
        sizes.append(len(branches))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(ModelRunner, "logits_after_each", fail)
    assert num_known(Calibration(model, Group.alone(), None).vocabulary()) == (0, 0)
    assert sizes == [FIRST_SLICE_TEXTS, MIN_SLICE_TEXTS]


def start_on_ranks(group: Group, folder: Path, cache_dir: Path) -> list[np.ndarray]:
    """Return a replica's entries after a first start, a second start, and after a new replica joins.

    Each start has time for one slice.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_prior, "ASKING_SECONDS", 0.0)
        model, known, new = model_of(folder), Measured(), Measured()
        first = Calibration(model, group, str(cache_dir)).vocabulary()
        second = Calibration(model, group, str(cache_dir), known).vocabulary()
        patch.setattr(ModelRunner, "logits_after_each", None)  # a new replica does not delay the others
        joined = Calibration(model, group, None, new if group.rank == 0 else known).vocabulary()
        return [first, second, joined]


def test_replicas_share_computation_of_prior_and_agree(folder, tmp_path):
    results = run_ranks(start_on_ranks, 2, folder, tmp_path)
    for mine, theirs in zip(*results, strict=True):
        assert (mine == theirs).all()
    first, second, joined = results[0]
    assert num_known(first) == (2 * FIRST_SLICE_TEXTS, 0) and num_known(second) == (4 * FIRST_SLICE_TEXTS, 0)
    assert (joined == second).all()


def test_prior_is_computed_before_replica_is_ready(folder, tmp_path, one_slice):
    model = ModelConfig(path=str(folder), packing="off")  # otherwise measured times would affect file names
    for num_starts in (1, 2):
        config = RuntimeConfig(
            model=model, device="cpu", dtype="float32", lookahead=FIXED, cache_dir=str(tmp_path / "cache")
        )
        with start_replica(config, ReplicaContext(owns_process=False)):
            (file,) = (tmp_path / "cache").glob("vocabulary-*.npz")
            with np.load(file) as saved:
                assert saved["known"].sum() == num_starts * FIRST_SLICE_TEXTS
