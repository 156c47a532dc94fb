"""Kernels for the CPU: they compute the same as torch, and are used only for supported inputs."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lp_runtime.kernels import numba_cpu, numba_loops
from lp_runtime.kernels.numba_cpu import MAX_SIZE, add_and_norm, array_of, norm, rotate_and_write, supports
from lp_runtime.utils import jit


@pytest.fixture
def fresh():
    """Make the kernels be compiled and checked again, both now and after the test."""
    caches = (numba_cpu._can_run, numba_cpu._try_kernels, numba_loops.loops)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 7, 96), (2, 3, 5, 33), (4, 1)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@torch.inference_mode()
def test_norm_kernels_match_llama_rms_norm(shape, scale):
    states, added, weight = scale * torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    expected = LlamaRMSNorm(shape[-1], eps=1e-5)
    expected.weight.copy_(weight)
    torch.testing.assert_close(norm(states, weight.numpy(), 1e-5), expected(states), rtol=1e-5, atol=1e-6)
    before = states.clone()
    total, normed = add_and_norm(states, added, weight.numpy(), 1e-5)
    assert torch.equal(total, states + added)
    torch.testing.assert_close(normed, expected(states + added), rtol=1e-5, atol=1e-6)
    assert torch.equal(states, before)


def test_norm_of_a_row_is_independent_of_other_rows():
    """The bits are equal, which exactness=strict requires."""
    states, weight = torch.randn(9, 200), np.ones(200, np.float32)
    together = norm(states, weight, 1e-5)
    for row in range(9):
        assert torch.equal(norm(states[row : row + 1], weight, 1e-5)[0], together[row])


@pytest.mark.parametrize(("num_queries", "num_keys", "size"), [(4, 2, 16), (3, 3, 6), (8, 1, 2)])
@pytest.mark.parametrize("in_one", [True, False])
def test_rotate_and_write_matches_apply_rotary_pos_emb(num_queries, num_keys, size, in_one):
    num_tokens, start, capacity = 5, 3, 11
    states = torch.randn(1, num_tokens, num_queries + 2 * num_keys, size)
    query, key, value = states.split((num_queries, num_keys, num_keys), 2)
    cos, sin = torch.randn(2, 1, num_tokens, size)
    cache = torch.randn(2, 1, num_keys, capacity, size)
    expected_cache = cache.clone()
    expected_query, expected_key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    expected_cache[0][:, :, start : start + num_tokens] = expected_key
    expected_cache[1][:, :, start : start + num_tokens] = value.transpose(1, 2)
    if in_one:
        arrays, first = [states.numpy()] * 3, (0, num_queries, num_queries + num_keys)
    else:
        arrays, first = [array_of(each) for each in (query, key, value)], (0, 0, 0)
    actual = rotate_and_write(
        *arrays, first, (num_queries, num_keys), cos.numpy(), sin.numpy(), start, *(each.numpy() for each in cache)
    )
    torch.testing.assert_close(actual, expected_query)
    torch.testing.assert_close(cache, expected_cache)


def test_writing_past_the_cache_raises():
    states, angles, cache = np.zeros((1, 3, 3, 2), np.float32), np.zeros((1, 3, 2), np.float32), np.zeros((1, 1, 4, 2))
    with pytest.raises(AssertionError):
        rotate_and_write(states, states, states, (0, 1, 2), (1, 1), angles, angles, 2, cache, cache)


def test_supports_returns_false_for_unsupported_states():
    assert supports(torch.zeros(1, 2, 8))
    for states in (
        torch.zeros(1, 2, 8, dtype=torch.bfloat16),
        torch.zeros(1, 2, 8, dtype=torch.float64),
        torch.zeros(MAX_SIZE + 1),
        torch.zeros(1, 2, 8, requires_grad=True),
        torch.zeros(1, 8, 2).transpose(1, 2),
        torch.zeros(1, 2, 8, device="meta"),
    ):
        assert not supports(states)


def test_kernels_are_not_used_if_their_results_are_wrong(fresh, monkeypatch, caplog):
    monkeypatch.setattr(numba_cpu, "norm", lambda states, *_: states)
    monkeypatch.setattr(jit, "_cache_folders", set())  # keeps the cached code of other processes
    with caplog.at_level(logging.WARNING):
        assert not supports(torch.zeros(1, 2, 8))
    assert "kernels for the CPU do not run" in caplog.text and "going on without" in caplog.text
