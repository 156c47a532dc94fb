"""The vocabulary prior, computed within a time limit, over several starts and by several replicas."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.calibration import is_equal
from support.processes import wait_until
from support.ranks import CPU, run_ranks

from lp_runtime.calibration import vocabulary_prior
from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.vocabulary_prior import FIRST_SLICE_TEXTS, MIN_SLICE_TEXTS
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.top_k import ENTRY, MARGIN_BITS, K, VocabularyPrior
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.replica import start_replica
from lp_runtime.utils.files import is_locked
from lp_runtime.utils.memory import HOST_ALLOCATOR

SIZE = 700  # tokens of the vocabulary: several slices
NUM_PAIRED = 100
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


def num_known(prior: VocabularyPrior) -> tuple[int, int]:
    """Return for how many tokens, and for how many with their likely successors, the prior is known."""
    after_pair = prior.after_pair.reshape(-1, K, ENTRY)[:, :, 0]
    return int((prior.after_token[:, 0] >= 0).sum()), int((after_pair >= 0).all(axis=1).sum())


def test_next_start_continues_prior_from_disk(folder, tmp_path, monkeypatch, one_slice):
    monkeypatch.setattr(vocabulary_prior, "NUM_PAIRED", NUM_PAIRED)
    model, results = model_of(folder), []
    num_slices, num_paired = -(-SIZE // FIRST_SLICE_TEXTS), FIRST_SLICE_TEXTS // (1 + K)
    for _ in range(num_slices + 2):
        results.append(Calibration(model, Group.alone(), str(tmp_path)).vocabulary())
    known = [(FIRST_SLICE_TEXTS * start, 0) for start in range(1, num_slices)]
    assert list(map(num_known, results)) == [*known, (SIZE, 0), (SIZE, num_paired), (SIZE, 2 * num_paired)]
    assert (results[0].after_token[:FIRST_SLICE_TEXTS, 0] >= 0).all()  # the lowest ids first
    assert (results[-1].after_pair[: 2 * num_paired * K, 0] >= 0).all()
    monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 60.0)
    results.append(Calibration(model, Group.alone(), str(tmp_path)).vocabulary())
    monkeypatch.setattr(ModelRunner, "logits_after_each", None)
    complete = Calibration(model, Group.alone(), str(tmp_path)).vocabulary()
    assert is_equal(complete, results[-1]) and num_known(complete) == (SIZE, NUM_PAIRED)
    monkeypatch.undo()
    monkeypatch.setattr(vocabulary_prior, "NUM_PAIRED", NUM_PAIRED)
    monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 60.0)
    at_once = Calibration(model, Group.alone(), None).vocabulary()
    for mine, theirs in zip(complete, at_once, strict=True):
        assert (mine[:, :K] == theirs[:, :K]).mean() > 0.99  # up to ties


def test_prior_is_computed_once_per_process(folder, monkeypatch, one_slice):
    model, known = model_of(folder), Measured()
    first = Calibration(model, Group.alone(), None, known).vocabulary()
    monkeypatch.setattr(ModelRunner, "logits_after_each", None)
    assert is_equal(Calibration(model, Group.alone(), None, known).vocabulary(), first)


@pytest.mark.parametrize(
    ("fails_at", "error"),
    [(1, torch.OutOfMemoryError("no memory")), (2, RuntimeError(HOST_ALLOCATOR))],
    ids=["single tokens", "pairs, on a host"],
)
def test_lack_of_memory_shrinks_slice_and_then_stops(folder, monkeypatch, fails_at, error):
    model, sizes = model_of(folder), []
    monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 60.0)
    logits_after_each = ModelRunner.logits_after_each

    def fail(self, slot, branches, text):
        if len(branches[0]) < fails_at:
            return logits_after_each(self, slot, branches, text)
        sizes.append(len(branches))
        raise error

    monkeypatch.setattr(ModelRunner, "logits_after_each", fail)
    assert num_known(Calibration(model, Group.alone(), None).vocabulary()) == ((0, 0) if fails_at == 1 else (SIZE, 0))
    assert sizes[-1] == MIN_SLICE_TEXTS and (np.diff(sizes) <= 0).all() and len(sizes) > 2


@pytest.mark.parametrize("name", vocabulary_prior.SAVED)
def test_file_that_does_not_fit_is_ignored(folder, tmp_path, name, one_slice):
    model = model_of(folder)
    first = Calibration(model, Group.alone(), str(tmp_path)).vocabulary()
    (file,) = tmp_path.glob("vocabulary-*.npz")
    with np.load(file) as saved:
        arrays = dict(saved)
    for wrong in (arrays[name][:1], arrays[name][:, None], np.array(1)):
        np.savez(file, **{**arrays, name: wrong})
        if wrong.shape != arrays[name].shape:
            assert is_equal(Calibration(model, Group.alone(), str(tmp_path)).vocabulary(), first)


def test_file_with_token_that_the_model_lacks_is_ignored(folder, tmp_path, one_slice):
    model = model_of(folder)
    first = Calibration(model, Group.alone(), str(tmp_path)).vocabulary()
    (file,) = tmp_path.glob("vocabulary-*.npz")
    with np.load(file) as saved:
        arrays = dict(saved)
    arrays["after_token"][-1, 1] = SIZE << MARGIN_BITS
    np.savez(file, **arrays)
    assert is_equal(Calibration(model, Group.alone(), str(tmp_path)).vocabulary(), first)


def start_on_ranks(group: Group, folder: Path, cache_dir: Path) -> list[VocabularyPrior]:
    """Return a replica's prior after a first start, a second start, and after a new replica joins.

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
        assert is_equal(mine, theirs)
    first, second, joined = results[0]
    assert num_known(first) == (2 * FIRST_SLICE_TEXTS, 0) and num_known(second) == (4 * FIRST_SLICE_TEXTS, 0)
    assert is_equal(joined, second)


def start_on_machines(group: Group, folder: Path, cache_dir: Path) -> list[VocabularyPrior]:
    """Return a replica's prior after starts alone, and after two starts in a group; each rank has a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_prior, "ASKING_SECONDS", 0.0)
        patch.setattr(vocabulary_prior, "SHARED_TOKENS", 32)
        model, mine = model_of(folder), str(cache_dir / f"{group.rank}")
        for _ in range(13 * group.rank):  # rank 0 has no file; rank 1 knows all single tokens, and pairs
            Calibration(model, Group.alone(), mine).vocabulary()
        first = Calibration(model, group, mine).vocabulary()
        patch.setattr(vocabulary_prior, "_share_part", None)  # the files are equal now, so only what is new is shared
        patch.setattr(vocabulary_prior, "ask", lambda *args: None)
        return [first, Calibration(model, group, mine).vocabulary()]


def test_replicas_with_different_files_agree_and_write_equal_ones(folder, tmp_path):
    results = run_ranks(start_on_machines, 2, folder, tmp_path)
    (first, second), (other_first, other_second) = results
    assert is_equal(first, other_first) and is_equal(second, other_second) and is_equal(first, second)
    num_paired = FIRST_SLICE_TEXTS // (1 + K)
    assert num_known(first) == (SIZE, (13 - -(-SIZE // FIRST_SLICE_TEXTS) + 2) * num_paired)


def test_larger_prior_stored_while_another_runtime_stores_is_kept(folder, tmp_path, monkeypatch, one_slice):
    """The other runtime, here a thread, comes between the look at the file and the write."""
    model, other_model, load = model_of(folder), model_of(folder), CalibrationFiles.load
    other = threading.Thread(target=lambda: Calibration(other_model, Group.alone(), str(tmp_path)).vocabulary())
    names: list[str] = []

    def look(self: CalibrationFiles, name: str, *args):
        found = load(self, name, *args)
        names.append(name)
        if len(names) == 2:  # the first look is before the model is asked
            monkeypatch.setattr(vocabulary_prior, "ASKING_SECONDS", 60.0)
            other.start()
            wait_until(lambda: not other.is_alive() or is_locked(tmp_path / f"{name}.lock"))
        return found

    monkeypatch.setattr(CalibrationFiles, "load", look)
    Calibration(model, Group.alone(), str(tmp_path)).vocabulary()
    other.join()
    monkeypatch.setattr(ModelRunner, "logits_after_each", None)
    assert num_known(Calibration(model, Group.alone(), str(tmp_path)).vocabulary()) == (SIZE, SIZE)


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
