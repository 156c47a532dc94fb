"""Measurements of a model, and their files."""

import numpy as np
import pytest
import torch
from support.calibration import is_equal
from support.ranks import CPU, run_ranks

from lp_runtime.calibration import step_meter
from lp_runtime.calibration.calibration import Calibration, Measured
from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.calibration.step_meter import (
    CONTEXT_TOKENS,
    MAX_ESTIMATED_MULTIPLE,
    MAX_LONG_NS,
    MIN_MEASURED_TOKENS,
    _StepMeter,
    measure_steps,
)
from lp_runtime.calibration.vocabulary_prior import ALONE, NOTHING, PAIRED, WIDTH, Answers
from lp_runtime.config.settings import ModelConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.top_k import ENTRY, MARGIN_BITS, K, VocabularyPrior
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.sampling.packing import HALF_BITS
from lp_runtime.utils.memory import HOST_ALLOCATOR


def tree_model(folder) -> ModelRunner:
    return ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 2048)


@pytest.fixture(scope="module")
def model(tiny_model_dir) -> ModelRunner:
    return tree_model(tiny_model_dir)


def test_steps_are_measured_in_nanoseconds(model):
    times = Calibration(model, Group.alone(), None).times(100)
    assert times.shape == (1, 101)
    assert (np.diff(times) >= 0).all()
    assert 10_000 < times[0, 1] < 1_000_000_000


def test_times_for_longer_texts_follow_measurement_after_long_text(model, monkeypatch):
    """After L tokens, a step of n tokens takes L (3 + 2 (n - 1)) ns longer than without them."""

    def step(meter: _StepMeter, size: int) -> int:
        return 100 + 100 * size + meter._slot.cache.length * (3 + 2 * (size - 1))

    monkeypatch.setattr(_StepMeter, "_step", step)
    calibration = Calibration(model, Group.alone(), None)
    context = min(CONTEXT_TOKENS, model.context_length // 4)
    short, long = calibration.times(8, 0)[0], calibration.times(8, context + 1024)[0]
    assert short[1:].tolist() == [step_of(size, context) for size in range(1, 9)]
    assert (long - short)[1:].tolist() == [step_of(size, 1024) - step_of(size, 0) for size in range(1, 9)]


def test_sizes_without_time_to_measure_are_estimated(model, monkeypatch):
    """Estimates lie on the line through the first and the last timed size.

    They are needed because a machine that is busy now may feed more tokens later.
    """
    monkeypatch.setattr(step_meter, "MEASURE_SECONDS", -1.0)
    monkeypatch.setattr(_StepMeter, "_step", lambda meter, size: 100 + 10 * size)
    steps = measure_steps(model)
    assert steps.tokens[-1] == MAX_ESTIMATED_MULTIPLE * MIN_MEASURED_TOKENS
    assert steps.nanoseconds.tolist() == [100 + 10 * size for size in steps.tokens.tolist()]
    monkeypatch.setattr(_StepMeter, "_step", lambda meter, size: 1000 - 10 * size)  # the first one was disturbed
    assert measure_steps(model).nanoseconds.min() == 1000 - 10 * MIN_MEASURED_TOKENS


def step_of(size: int, length: int) -> int:
    return 100 + 100 * size + length * (3 + 2 * (size - 1))


def test_cost_of_longer_texts_is_not_measured_if_steps_are_slow(model, monkeypatch):
    monkeypatch.setattr(_StepMeter, "_step", lambda meter, size: MAX_LONG_NS + size)
    assert measure_steps(model).prefix_ns.tolist() == [0, 0]


def test_sizes_and_texts_that_do_not_fit_into_host_memory_are_not_measured(model, monkeypatch):
    def step(meter: _StepMeter, size: int) -> int:
        if size > 16 or meter._slot.cache.length > CONTEXT_TOKENS + 128:
            raise RuntimeError(HOST_ALLOCATOR)
        return 100 + 10 * size

    monkeypatch.setattr(_StepMeter, "_step", step)
    steps = measure_steps(model)
    assert steps.tokens[-1] == 16 and steps.prefix_ns.tolist() == [0, 0]


@pytest.fixture
def enough_time(monkeypatch) -> None:
    """Give each start time for all of the vocabulary prior."""
    monkeypatch.setattr("lp_runtime.calibration.vocabulary_prior.ASKING_SECONDS", 60.0)


def test_vocabulary_entries_match_logits_of_tokens_after_common_one(model, enough_time):
    size, vocabulary = model.vocabulary_size, Calibration(model, Group.alone(), None).vocabulary()
    assert vocabulary.after_token.shape == (size, ENTRY) and vocabulary.after_pair.shape == (size * K, ENTRY)
    with torch.inference_mode():
        spaced = torch.arange(64) * size // 64
        first = torch.full((64,), size // 2)
        likeliest = model.model(torch.stack([first, spaced], 1)).logits[:, 1].argmax(-1)
        common = likeliest.bincount().argmax().expand(size)
        pairs = torch.stack([common, torch.arange(size)], 1)
        after_token = model.model(pairs).logits[:, 1]
        successors = torch.from_numpy(vocabulary.after_token[:, :K]).reshape(-1, 1).long()
        after_pair = model.model(torch.cat([pairs.repeat_interleave(K, 0), successors], 1)).logits[:, 2]
    for logits, rows in ((after_token, vocabulary.after_token), (after_pair, vocabulary.after_pair)):
        chosen = logits.gather(1, torch.from_numpy(rows[:, :K]).long())
        assert torch.allclose(chosen, logits.topk(K).values, atol=1e-5)  # the same tokens, up to ties


def test_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path, caplog):
    folder = tmp_path / "file"
    folder.touch()
    for files in (CalibrationFiles(str(folder)), CalibrationFiles(str(folder)), CalibrationFiles("/proc/x", False)):
        for name in ("one", "two"):
            files.store(name, {"numbers": np.arange(3)})
            assert files.load(name, ["numbers"], dict) is None
    reason = "cannot be written, so each start measures the model again: File exists"
    assert caplog.messages == [f"cache_dir={folder}: {reason}"]


def test_measurements_are_stored_and_damaged_files_are_rewritten(model, tmp_path, monkeypatch, enough_time):
    first = Calibration(model, Group.alone(), str(tmp_path))
    times, vocabulary = first.times(50), first.vocabulary()
    files = sorted(tmp_path.glob("*.npz"))
    assert [file.name.split("-")[0] for file in files] == ["steps", "vocabulary"]
    again = Calibration(model, Group.alone(), str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("lp_runtime.calibration.calibration.measure_steps", None)
        patch.setattr("lp_runtime.calibration.vocabulary_prior.ask", None)
        assert (again.times(50) == times).all()
        assert is_equal(again.vocabulary(), vocabulary)
    for file in files:
        file.write_bytes(file.read_bytes()[:50])
    assert is_equal(Calibration(model, Group.alone(), str(tmp_path)).vocabulary(), vocabulary)
    assert files[1].stat().st_size > 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": np.array([], np.int64), "nanoseconds": np.array([], np.int64)},
        {"tokens": np.arange(1, 500), "nanoseconds": np.arange(1, 500)},
        {"tokens": np.array(3)},
        {"nanoseconds": np.array([5])},
        {"prefix_ns": np.arange(5)},
        {"harvest_ns": np.array(np.nan)},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_file_of_steps_that_does_not_fit_is_measured_again(model, tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(_StepMeter, "_step", lambda meter, size: 100 + 10 * size)
    times = Calibration(model, Group.alone(), str(tmp_path)).times(50)
    (file,) = tmp_path.glob("steps-*.npz")
    with np.load(file) as saved:
        np.savez(file, **{**saved, **wrong})
    assert (Calibration(model, Group.alone(), str(tmp_path)).times(50) == times).all()
    assert (Calibration(model, Group.alone(), str(tmp_path)).times(50) == times).all()


def test_unwritable_cache_folder_is_ignored(model):
    vocabulary = Calibration(model, Group.alone(), "/proc/nowhere").vocabulary()
    assert len(vocabulary.after_token) == model.vocabulary_size


def test_models_share_no_file_and_kinds_of_passes_share_the_vocabulary(
    tiny_model_dir, one_layer_demo_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr("lp_runtime.calibration.vocabulary_prior.ASKING_SECONDS", 0.0)

    def num_files(model: ModelRunner) -> list[int]:
        calibration = Calibration(model, Group.alone(), str(tmp_path))
        calibration.max_step_tokens()
        calibration.vocabulary()
        return [len([*tmp_path.glob(f"{name}-*.npz")]) for name in ("steps", "vocabulary")]

    model = tree_model(tiny_model_dir)
    assert num_files(model) == num_files(model) == [1, 1]
    model.model.set_attn_implementation("eager")
    assert num_files(ModelRunner(model.model, 2048)) == [2, 1]
    assert num_files(tree_model(one_layer_demo_dir)) == [3, 2]


def test_vocabulary_entries_without_time_to_compute_are_empty(model, monkeypatch):
    monkeypatch.setattr("lp_runtime.calibration.vocabulary_prior.ASKING_SECONDS", 0.0)
    monkeypatch.setattr("lp_runtime.calibration.vocabulary_prior.FIRST_SLICE_TEXTS", 8)
    vocabulary = Calibration(model, Group.alone(), None).vocabulary()
    assert (vocabulary.after_token[:8, 0] >= 0).all() and (vocabulary.after_token[8:, :K] == -1).all()
    assert (vocabulary.after_pair[:, :K] == -1).all()


def tune_on_ranks(group: Group, folder: str):
    model = tree_model(folder)
    calibration = Calibration(model, group, None)
    return (
        calibration.times(20),
        candidates_of(calibration.vocabulary()),
        *(vocabulary_of(model, group, each) for each in KNOWN.values()),
    )


def made_up(value: int) -> Answers:
    """Return answers in which all candidates of all tokens are the same token."""
    pair = value << MARGIN_BITS | value << MARGIN_BITS + HALF_BITS
    after_token, after_pair = np.full((64, WIDTH), pair, np.int64), np.full((64, K, WIDTH), pair, np.int64)
    return Answers(after_token, after_pair, np.full(64, PAIRED, np.uint8))


def part_of(answers: Answers, first: int, last: int, known: int = PAIRED) -> Answers:
    """Return answers about some tokens only; see `Answers.known`."""
    places = np.arange(64)
    are_known = np.where((places >= first) & (places < last), known, NOTHING).astype(np.uint8)
    return Answers(answers.after_token, answers.after_pair, are_known)


# The answers that each of two replicas has before they share them; the keys say which ones both have afterwards.
KNOWN = {
    "the same": (made_up(3), made_up(3)),
    "rank 0's": (made_up(3), made_up(4)),
    "rank 0's, too": (made_up(3), None),
    "rank 1's": (None, made_up(4)),
    "both's": (part_of(made_up(3), 0, 40), part_of(made_up(4), 30, 64)),
    "rank 1's pairs": (part_of(made_up(3), 0, 64, ALONE), part_of(made_up(4), 0, 64)),
    "found out": (None, None),
}


def candidates_of(prior: VocabularyPrior) -> np.ndarray:
    """Return the candidates, [64, 1 + K, K], after each token alone and after its pairs."""
    after_pair = prior.after_pair[:, :K].reshape(-1, K, K)
    return np.concatenate([prior.after_token[:, None, :K], after_pair], axis=1)


def vocabulary_of(model, group: Group, known) -> np.ndarray:
    return candidates_of(Calibration(model, group, None, Measured(vocabulary=known[group.rank])).vocabulary())


def test_replicas_share_measurements_and_vocabulary_entries(model, tiny_model_dir):
    results = run_ranks(tune_on_ranks, 2, str(tiny_model_dir))
    alone = Calibration(model, Group.alone(), None).vocabulary()
    assert (results[0][0] == results[1][0]).all() and results[0][0].shape == (2, 21)
    for _, actual, same, first, first_too, second, both, with_pairs, last in results:
        assert (actual == candidates_of(alone)).mean() > 0.99
        for vocabulary in (same, first, first_too):
            assert (vocabulary == 3).all()
        assert (second == 4).all() and (with_pairs == 4).all()
        assert (both[:40] == 3).all() and (both[40:] == 4).all()
        assert (last == actual).all()
