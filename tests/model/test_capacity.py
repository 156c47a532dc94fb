"""The number of tokens that fit into free memory."""

import pytest
import torch

from lp_runtime.model import capacity
from lp_runtime.model.capacity import PassBytes
from lp_runtime.model.kv_cache.slots import OVERHEAD_TOKENS
from lp_runtime.model.runner import ModelRunner
from lp_runtime.utils import limits

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that writes a machine's files: available kB; a container's limit and use in bytes."""
    monkeypatch.setattr(capacity, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")

    def write(available=None, limit=None, used=None):
        if available is not None:
            (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available} kB\n")
        (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 100\nactive_file 20\nslab_reclaimable 3\n")
        for name, value in (("memory.max", limit), ("memory.current", used)):
            if value is not None:
                (tmp_path / name).write_text(f"{value}\n")

    return write


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"available": 5}, 5 * 1024),
        ({"available": 5, "limit": "max", "used": 100}, 5 * 1024),
        ({"available": 5, "limit": 3000, "used": 1000}, 2123),
        ({"limit": 3000, "used": 4000}, 0),
    ],
)
def test_free_memory_respects_machine_and_container_limits(files, expected, machine):
    machine(**files)
    assert capacity.free_bytes(CPU) == expected


def test_free_memory_respects_limits_of_version_1(tmp_path, machine):
    machine()
    (tmp_path / "own").write_text("5:cpu,cpuacct:/\n4:memory:/job/step\n0::/\n")
    for name, limit in (("", 9223372036854771712), ("job", 5000), ("job/step", 7000)):
        folder = tmp_path / "memory" / name
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text("4000\n")
        (folder / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 90\ntotal_active_file 5\n")
    assert capacity.free_bytes(CPU) == 1095


def test_capacity_in_tokens_follows_free_memory(random_model, machine):
    model = random_model()
    config = model.config
    tree_model = ModelRunner(model, 2048)
    assert capacity.capacity_in_tokens(tree_model, 1) is None  # its cache is unknown before the first pass
    with tree_model.slots.borrowed() as slot:
        tree_model.begin(slot, 50)
        tree_model.prefill(slot, [1, 2, 3])
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert tree_model.cache_bytes_per_token == each
    machine(available=1000 * each)  # kB
    assert capacity.capacity_in_tokens(tree_model, 1) == pytest.approx(1_024_000 * 0.9 - 1024, abs=2)
    assert capacity.capacity_in_tokens(tree_model, 4) == pytest.approx(256_000 * 0.9 - 1024, abs=2)
    measured = PassBytes(1000 * each, 0.25 * each)  # for each text; no text is longer than 256 tokens
    left = 1_024_000 * 0.97 - 1000 - 0.25 * 256 - OVERHEAD_TOKENS
    assert capacity.capacity_in_tokens(tree_model, 1, pass_bytes=measured) == pytest.approx(left, abs=2)
    tree_model.context_length = None
    left = (1_024_000 * 0.97 - 1000) / 1.25 - OVERHEAD_TOKENS
    assert capacity.capacity_in_tokens(tree_model, 1, pass_bytes=measured) == pytest.approx(left, abs=2)
    machine(available=1)
    assert capacity.capacity_in_tokens(tree_model, 1) == 0
    assert capacity.capacity_in_tokens(tree_model, 1, pass_bytes=measured) == 0


def test_unused_memory_of_graph_pools_is_not_free(monkeypatch):
    """Memory in a graph's pool that is unused between replays is not available to other allocations."""
    segments = [
        {"device": 0, "total_size": 500, "allocated_size": 100, "segment_pool_id": (0, 0)},
        {"device": 0, "total_size": 300, "allocated_size": 60, "segment_pool_id": (0, 7)},
        {"device": 1, "total_size": 300, "allocated_size": 10, "segment_pool_id": (0, 7)},
    ]
    known = {"mem_get_info": (1000, 9999), "memory_reserved": 800, "memory_allocated": 160, "memory_snapshot": segments}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    assert capacity.free_bytes(torch.device("cuda", 0)) == 1000 + (800 - 160) - (300 - 60)


def test_exchange_memory_reduces_capacity(random_model, machine):
    assert capacity.exchange_bytes(1, True) == 0
    assert 0 < capacity.exchange_bytes(2, False) < capacity.exchange_bytes(8, False) < 1 << 20
    assert capacity.exchange_bytes(8, True) > capacity.NCCL_BYTES
    model = ModelRunner(random_model(), 2048)
    with model.slots.borrowed() as slot:
        model.begin(slot, 50)
        model.prefill(slot, [1, 2, 3])
    machine(available=1000 * model.cache_bytes_per_token)
    all_of_it, less = (capacity.capacity_in_tokens(model, 4, each * model.cache_bytes_per_token) for each in (0, 1000))
    assert all_of_it - less == pytest.approx(900, abs=2)
