"""The vocabulary prior, asked bit by bit: between requests, by several replicas, over several starts."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.processes import wait_until
from support.ranks import CPU, run_ranks

from lp_runtime.calibration import calibration, vocabulary_prior
from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.context import ReplicaContext
from lp_runtime.distributed.transport.group import Group
from lp_runtime.launchers.wire.messages import Join, Prefill, Prefilled
from lp_runtime.launchers.wire.sealed_request import seal
from lp_runtime.launchers.worker.process_host import Placement
from lp_runtime.launchers.worker.replica_server import ReplicaServer
from lp_runtime.lookahead.top_k import K
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.replica import Replica, start_replica
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

SIZE = 700  # of the vocabulary: several slices
FIXED = LookaheadConfig(5, 4, 5)


@pytest.fixture(scope="module")
def folder(make_model_dir) -> Path:
    return make_model_dir(vocab_size=SIZE)


def model_of(folder: Path) -> ModelRunner:
    return ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 2048)


def gradual(model: ModelRunner, group: Group, cache_dir: Path | None = None) -> Calibration:
    return Calibration(model, group, None if cache_dir is None else str(cache_dir), Measured(), is_gradual=True)


def num_known(entries: np.ndarray) -> int:
    return int((entries[:, 0] >= 0).sum())


def is_complete(cache_dir: Path) -> bool:
    """Whether a file holds the whole prior."""
    for file in cache_dir.glob("vocabulary-*.npz"):
        with np.load(file) as saved:
            return bool(saved["is_known"].all())
    return False


def asking_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("vocabulary prior")]


def test_what_is_asked_bit_by_bit_is_what_is_asked_at_once(folder, monkeypatch):
    monkeypatch.setattr(calibration, "SWEEP_SECONDS", 3600.0)  # however busy the machine is
    model = model_of(folder)
    whole = Calibration(model, Group.alone(), None).vocabulary()
    prior = gradual(model, Group.alone())
    known = [num_known(prior.vocabulary())]
    while prior.ask_vocabulary():
        known.append(num_known(prior.vocabulary()))
    entries = prior.vocabulary()
    assert known[0] == 0 and known[1] == vocabulary_prior.FIRST_SLICE_TOKENS and known == sorted(set(known))
    assert prior.has_vocabulary and (entries[:, :K] == whole[:, :K]).mean() > 0.99  # up to ties


def test_what_was_asked_before_the_end_is_gone_on_with_at_the_next_start(folder, tmp_path, monkeypatch):
    model = model_of(folder)
    first = gradual(model, Group.alone(), tmp_path)
    assert first.ask_vocabulary()
    first.save_vocabulary()
    second = gradual(model, Group.alone(), tmp_path)
    assert num_known(second.vocabulary()) == vocabulary_prior.FIRST_SLICE_TOKENS
    while second.ask_vocabulary():
        pass
    second.save_vocabulary()
    assert is_complete(tmp_path)
    monkeypatch.setattr(vocabulary_prior.VocabularyPrior, "ask_once", None)
    third = gradual(model, Group.alone(), tmp_path)
    assert (third.vocabulary() == second.vocabulary()).all()


def test_a_device_without_memory_asks_about_less_and_then_no_more(folder, monkeypatch):
    model, sizes = model_of(folder), []

    def fail(self, slot, tokens, behind):
        sizes.append(len(tokens))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(ModelRunner, "logits_after_each", fail)
    prior = gradual(model, Group.alone())
    assert prior.ask_vocabulary() and not prior.ask_vocabulary() and not prior.ask_vocabulary()
    assert sizes == [vocabulary_prior.FIRST_SLICE_TOKENS, vocabulary_prior.MIN_SLICE_TOKENS]
    assert num_known(prior.vocabulary()) == 0


def ask_on_ranks(group: Group, folder: Path) -> list[np.ndarray]:
    """What a replica knows at each of several requests, and replicas ask differently much between them."""
    prior = gradual(model_of(folder), group)
    found = [prior.vocabulary().copy()]
    if group.rank == 1:
        prior.ask_vocabulary()
    found.append(prior.vocabulary().copy())
    for _ in range(2 + group.rank):
        prior.ask_vocabulary()
    found.append(prior.vocabulary().copy())
    while prior.ask_vocabulary():
        pass
    found.append(prior.vocabulary().copy())
    return found


def test_replicas_know_the_same_at_every_request(folder):
    """What one has found is shared once it is much, and then with all."""
    results = run_ranks(ask_on_ranks, 2, folder)
    for mine, theirs in zip(*results, strict=True):
        assert (mine == theirs).all()
    known = [num_known(entries) for entries in results[0]]
    assert known[:2] == [0, 0] and SIZE // vocabulary_prior.MIN_NEW_PART <= known[2] < SIZE and known[3] == SIZE
    alone = Calibration(model_of(folder), Group.alone(), None).vocabulary()
    assert (results[0][3][:, :K] == alone[:, :K]).mean() > 0.99


REQUEST = Request((5, 6, 7), FIXED, 24)


def replica_of(folder: Path, cache_dir: Path | None) -> AbstractContextManager[Replica]:
    cache = None if cache_dir is None else str(cache_dir)
    model = ModelConfig(path=str(folder), packing="off")  # else what is measured decides, and names the files
    config = RuntimeConfig(model=model, device="cpu", dtype="float32", lookahead=FIXED, cache_dir=cache)
    return start_replica(config, ReplicaContext(owns_process=False))


def tokens_of(replica: Replica) -> list[int]:
    *outputs, _ = replica.decode(REQUEST)
    return [token for output in outputs for token in output.token_ids]


def test_a_replica_asks_between_requests(folder, tmp_path, monkeypatch):
    """The first request finds a slice of the prior; the rest is asked while nobody decodes, and kept."""
    monkeypatch.setattr(calibration, "START_SECONDS", 0.0)
    with replica_of(folder, tmp_path) as replica:
        first = tokens_of(replica)
        wait_until(lambda: is_complete(tmp_path))
        assert tokens_of(replica) == first and len(asking_threads()) == 1
    assert not asking_threads()
    with replica_of(folder, tmp_path) as replica:
        assert not asking_threads() and tokens_of(replica) == first


def test_nothing_is_asked_while_a_request_decodes(folder, monkeypatch):
    monkeypatch.setattr(calibration, "START_SECONDS", 0.0)
    monkeypatch.setattr(vocabulary_prior, "MAX_SLICE_TOKENS", {"cpu": 1})
    num_asked = []
    ask_about = vocabulary_prior.VocabularyPrior.ask_once

    def watched(prior) -> bool:
        num_asked.append(1)
        return ask_about(prior)

    monkeypatch.setattr(vocabulary_prior.VocabularyPrior, "ask_once", watched)
    with replica_of(folder, None) as replica:
        wait_until(lambda: len(num_asked) > 2)
        events = replica.decode(REQUEST)
        event = next(events)
        num_before = len(num_asked)
        while not isinstance(event, Report):
            event = next(events)
        assert len(num_asked) == num_before < SIZE
        events.close()
        wait_until(lambda: len(num_asked) > num_before)


def test_a_prompt_that_is_fed_ahead_has_the_model_to_itself(folder, monkeypatch):
    """A replica that is to join a request feeds its prompt outside of `decode`."""
    events: list[object] = []
    in_use = Replica.in_use

    @contextmanager
    def noted(replica):
        events.append("alone")
        with in_use(replica):
            yield

    monkeypatch.setattr(Replica, "in_use", noted)
    model = ModelConfig(path=str(folder))
    config = RuntimeConfig(model=model, device="cpu", dtype="float32", lookahead=FIXED, cache_dir=None)
    server = ReplicaServer(config, Placement(0, 1), lambda message: events.append(type(message)))
    threading.Thread(target=server.run, daemon=True).start()
    server.post(Join(1, ReplicaContext()))
    server.post(Prefill(2, seal(REQUEST)))
    wait_until(lambda: Prefilled in events)
    assert events[-2:] == ["alone", Prefilled]
