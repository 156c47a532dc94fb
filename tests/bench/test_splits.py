"""Tests of lp-bench splits=auto, which measures each split of the GPUs, and gpus_per_replica=fastest."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lp_runtime.bench import splits
from lp_runtime.bench.methods import Result
from lp_runtime.config.commands import BenchConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.launchers.split import choose_split, keep_speeds

FIXED = LookaheadConfig(W=5, N=3, G=5, prior="none")


@pytest.mark.slow
def test_fastest_takes_the_faster_of_two_measured_splits(demo_model_dir, tmp_path, capsys):
    """Both splits are measured, printed and written, and gpus_per_replica=fastest takes the faster one."""
    settings = {"model": ModelConfig(path=str(demo_model_dir)), "gpus": 2, "device": "cpu", "dtype": "float32"}
    settings |= {"cache_dir": str(tmp_path / "cache"), "lookahead": FIXED}
    with pytest.raises(
        ConfigError, match=r"fastest: nothing was measured .* run lp-bench splits=auto gpus=2 model.path="
    ):
        choose_split(RuntimeConfig(**settings, gpus_per_replica="fastest"), 0, list)
    config = BenchConfig(**settings, splits="auto", max_new_tokens=16, limit=1, output=str(tmp_path))
    speeds = splits.measure_splits(config)
    assert [(each.replicas, each.gpus_per_replica, each.refusal) for each in speeds] == [(2, 1, ""), (1, 2, "")]
    assert all(each.compression >= 1 and each.step_ms > 0 and each.tokens_per_second > 0 for each in speeds)
    written = json.loads((tmp_path / "splits.json").read_text())
    assert [row["tokens_per_second"] for row in written] == [each.tokens_per_second for each in speeds]
    table = capsys.readouterr().out
    assert table == (tmp_path / "splits.md").read_text() and "| 2 x 1 | " in table and "| 1 x 2 | " in table
    best = max(speeds, key=lambda each: each.tokens_per_second)
    chosen = choose_split(RuntimeConfig(**settings, gpus_per_replica="fastest"), 0, list)
    assert (chosen.num_shards, chosen.num_replicas) == (best.gpus_per_replica, best.replicas)


def test_failing_split_is_reported_and_the_others_are_measured(demo_model_dir, tmp_path, monkeypatch, capsys):
    settings = {"model": ModelConfig(path=str(demo_model_dir)), "gpus": 4, "cache_dir": str(tmp_path)}
    made = {1: 10.0, 2: 5.0}  # GPUs per replica: seconds

    def decode(config):
        if config.replica_gpus not in made:
            raise ModelError("too many heads")
        seconds = made[config.replica_gpus]
        return [Result([1] * 30, {None: seconds}, 11, None, prefill_seconds=seconds / 2)] * 2

    monkeypatch.setattr(splits, "_decode", decode)
    speeds = splits.measure_splits(BenchConfig(**settings, splits="auto"))
    assert [each.tokens_per_second for each in speeds] == [3.0, 6.0, 0.0]
    assert (speeds[1].compression, speeds[1].step_ms) == (30 / 11, 250.0)
    assert "| 1 x 4 |  |  | too many heads |" in capsys.readouterr().out
    assert choose_split(RuntimeConfig(**settings, gpus_per_replica="fastest"), 0, list).num_shards == 2
    made.clear()
    with pytest.raises(ModelError, match="too many heads"):
        splits.measure_splits(BenchConfig(**settings, splits="auto"))


def test_measured_speeds_apply_only_to_the_same_settings(demo_model_dir, tmp_path):
    """Speeds are not used for other settings, and are not kept without a cache folder."""
    config = RuntimeConfig(model=ModelConfig(path=str(demo_model_dir)), gpus=4, cache_dir=str(tmp_path))
    keep_speeds(config, {1: 1.0, 4: 3.0, 2: 2.0})
    wanted = {"model": config.model, "cache_dir": str(tmp_path), "gpus_per_replica": "fastest"}
    assert choose_split(RuntimeConfig(**wanted, gpus=4), 0, list).num_shards == 4
    assert choose_split(RuntimeConfig(**wanted, device="auto"), 4, list).num_gpus == 4  # all GPUs
    for other in ({"gpus": 2}, {"gpus": 4, "dtype": "bfloat16"}, {"gpus": 4, "cache_dir": None}):
        with pytest.raises(ConfigError, match="gpus_per_replica=fastest: nothing was measured"):
            choose_split(RuntimeConfig(**wanted | other), 0, list)
    (file,) = tmp_path.glob("splits-*.npz")
    for numbers in ([0, 1, 2], [1, 2], [1.5, 2.0, 4.0]):
        np.savez(file, gpus_per_replica=np.array(numbers), tokens_per_second=np.arange(3.0))
        with pytest.raises(ConfigError, match="gpus_per_replica=fastest: nothing was measured"):
            choose_split(RuntimeConfig(**wanted, gpus=4), 0, list)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"splits": "all", "gpus": 2}, "splits=all: must be one of auto"),
        ({"splits": "auto"}, "splits=auto: give the number of GPUs to divide"),
        ({"splits": "auto", "gpus": 2, "degrees": [2]}, "splits=auto: not with degrees"),
        ({"splits": "auto", "gpus": 2, "gpus_per_replica": 2}, "splits=auto: not with gpus_per_replica"),
    ],
)
def test_settings_incompatible_with_splits_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        BenchConfig(**settings)
    assert message in str(caught.value)
