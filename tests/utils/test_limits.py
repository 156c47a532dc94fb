"""The number of cores: affinity, and the quotas of control groups in either version."""

import os

import pytest
import torch

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.replica.loaded_model import load_replica
from lp_runtime.utils import limits
from lp_runtime.utils.limits import num_cores


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that sets this process's groups and writes files, on a machine of 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(limits, "ROOT", tmp_path / "mounts")
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / "mounts" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


V1 = "3:cpu,cpuacct:/job/step\n2:memory:/other\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b/c\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "500000 100000\n"}, 3),
        ("0::/docker/of_the_host\n", {"cpu.max": "200000 100000\n"}, 2),
        ("1:cpu:/\n0::/job\n", {"unified/job/cpu.max": "400000 100000\n"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        (V1, {"cpu/job/cpu.cfs_quota_us": "700000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 7),
        (V1, {"cpu/other/cpu.cfs_quota_us": "700000\n", "cpu/other/cpu.cfs_period_us": "100000\n"}, 16),
        ("", {"cpu.max": "200000 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 16),
    ],
)
def test_quota_of_own_group_and_those_around_it(groups, own, files, expected):
    groups(own, files)
    assert num_cores() == expected


def test_replicas_share_the_cores_of_the_quota(groups, tiny_model_dir):
    groups("0::/\n", {"cpu.max": "600000 100000\n"})
    before = torch.get_num_threads()
    try:
        load_replica(
            RuntimeConfig(model=ModelConfig(str(tiny_model_dir)), device="cpu"), 0, num_local=2, owns_process=True
        )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
