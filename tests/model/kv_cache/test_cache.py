"""The KV cache: written after the committed tokens, truncated by changing its length."""

import pytest
import torch

from lp_runtime.model.kv_cache.cache import TreeCache


def states(*values: float) -> torch.Tensor:
    """Return states [1, 2 heads, T, 3] with one value per token."""
    return torch.tensor(values)[None, None, :, None].expand(1, 2, len(values), 3).clone()


def seen(returned: torch.Tensor) -> list[float]:
    assert returned.shape[:2] == (1, 2)
    assert (returned == returned[:, :1, :, :1]).all()
    return returned[0, 0, :, 0].tolist()


def test_update_returns_committed_and_new_tokens():
    cache = TreeCache(num_layers=2, capacity=10)
    keys, values = cache.update(states(1, 2, 3), states(-1, -2, -3), 0)
    assert seen(keys) == [1, 2, 3]
    assert seen(values) == [-1, -2, -3]
    cache.update(states(5, 6, 7), states(-5, -6, -7), 1)
    assert cache.length == 0
    cache.commit(2)
    assert cache.length == cache.get_seq_length(0) == cache.get_seq_length(1) == 2
    assert seen(cache.update(states(4), states(-4), 0)[0]) == [1, 2, 4]
    assert seen(cache.update(states(8), states(-8), 1)[1]) == [-5, -6, -8]


def test_uncommitted_tokens_are_overwritten():
    cache = TreeCache(num_layers=1, capacity=10)
    cache.update(states(1, 2, 3, 4), states(1, 2, 3, 4), 0)
    cache.commit(1)
    assert seen(cache.update(states(5, 6), states(5, 6), 0)[0]) == [1, 5, 6]
    cache.commit(0)
    assert seen(cache.update(states(7), states(7), 0)[0]) == [1, 7]


@pytest.mark.parametrize(("num_committed", "expected"), [(1, [1, 9]), (None, [9])], ids=["commit", "truncate"])
def test_protection_of_uncommitted_tokens_ends_with_the_step(num_committed, expected):
    cache = TreeCache(num_layers=1, capacity=10)
    cache.update(states(1, 2), states(1, 2), 0)
    cache.keep_writing(2)
    assert seen(cache.update(states(3), states(3), 0)[0]) == [1, 2, 3]
    cache.truncate(0) if num_committed is None else cache.commit(num_committed)
    assert seen(cache.update(states(9), states(9), 0)[0]) == expected


def test_clear_keeps_the_memory():
    cache = TreeCache(num_layers=1, capacity=4)
    cache.update(states(1, 2, 3), states(1, 2, 3), 0)
    memory = cache.layers[0].keys.data_ptr()
    cache.commit(3)
    cache.clear()
    assert cache.length == 0
    assert seen(cache.update(states(9), states(9), 0)[0]) == [9]
    assert cache.layers[0].keys.data_ptr() == memory


def test_commit_and_update_copy_no_memory():
    cache = TreeCache(num_layers=1, capacity=8)
    keys, _ = cache.update(states(1, 2, 3), states(1, 2, 3), 0)
    cache.commit(2)
    again, _ = cache.update(states(4), states(4), 0)
    assert keys.data_ptr() == again.data_ptr() == cache.layers[0].keys.data_ptr()


def test_cache_reports_mask_sizes_and_rejects_excess_commits():
    cache = TreeCache(num_layers=1, capacity=8)
    cache.update(states(1, 2), states(1, 2), 0)
    cache.commit(2)
    assert cache.get_mask_sizes(3, 0) == (5, 0)
    assert cache.layers[0].get_max_length() == 8
    with pytest.raises(AssertionError):
        cache.commit(7)


def test_growth_that_runs_out_of_memory_leaves_all_layers_as_they_were(monkeypatch):
    cache, new_empty, num_left = TreeCache(num_layers=2, capacity=10), torch.Tensor.new_empty, 3
    for layer in range(2):
        cache.update(states(1, 2), states(-1, -2), layer)
    cache.commit(2)

    def allocate(like, size):
        """Allocate, until the second layer grows: its values do not fit."""
        nonlocal num_left
        if size[-2] > 10 and (num_left := num_left - 1) < 0:
            raise torch.OutOfMemoryError("no memory")
        return new_empty(like, size)

    monkeypatch.setattr(torch.Tensor, "new_empty", allocate)
    with pytest.raises(torch.OutOfMemoryError):
        cache.grow(20)
    assert cache.capacity == 10 and [cache.tensors(layer)[0].shape[-2] for layer in range(2)] == [10, 10]
    assert cache.addresses.tolist() == [[each.data_ptr() for each in cache.tensors(layer)] for layer in range(2)]
    assert seen(cache.update(states(3), states(-3), 0)[1]) == [-1, -2, -3]
