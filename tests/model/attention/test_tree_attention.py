"""Attention to prefix and tree, in one call or merged from two, compared with one dense softmax."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import pytest
import torch
from support.thinned import thinned

from lp_runtime.model.attention import tree_attention as module
from lp_runtime.model.attention.mask_rows import ancestor_mask
from lp_runtime.model.attention.parts import attend, attend_masked
from lp_runtime.model.attention.tree_attention import chunk_mask, tree_attention

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def inputs(num_tokens: int, num_cached: int, groups: int, dtype: torch.dtype, size: int = 16):
    """Return (query, key, value, additive mask of the tree, ancestors) for 3 key/value heads.

    Queries, keys and values have the memory layout that models produce.
    """
    generator = torch.Generator().manual_seed(num_tokens + num_cached)

    def random_states(heads: int, tokens: int) -> torch.Tensor:
        return (2 * torch.randn(1, tokens, heads, size, generator=generator)).to(dtype).transpose(1, 2)

    rng = random.Random(num_tokens)
    parents = [-1, *(rng.randrange(node) for node in range(1, num_tokens))]
    seen = torch.from_numpy(ancestor_mask(parents))
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    num_keys = num_cached + num_tokens
    query, *states = (random_states(*each) for each in ((3 * groups, num_tokens), (3, num_keys), (3, num_keys)))
    return query, *states, mask[None, None], seen


def dense(query, key, value, seen, scale) -> torch.Tensor:
    """Compute attention by its definition, [1, T, heads, D] float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    visible = torch.ones(scores.shape[2:], dtype=torch.bool)
    visible[:, -len(seen) :] = seen
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("dtype", "groups", "length"),
    thinned(4, TOLERANCES, [1, 2, 4], [(1, 1), (1, 300), (2, 7), (17, 1), (33, 130), (120, 40)]),
)
def test_tree_attention_matches_dense_softmax(dtype, groups, length):
    num_tokens, num_cached = length
    query, key, value, mask, seen = inputs(num_tokens, num_cached, groups, dtype)
    whole = torch.cat([torch.zeros(num_tokens, num_cached, dtype=dtype), mask[0, 0]], dim=1)
    for scaling in (None, 0.7):
        expected = dense(query, key, value, seen, scaling or 16**-0.5)
        for form in (mask, whole[None, None]):
            actual, _ = tree_attention(SimpleNamespace(), query, key, value, form, scaling=scaling)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_extreme_scores_do_not_overflow():
    """Either all attention weight is on the prefix, or none of it."""
    query, key, value, mask, seen = inputs(9, 20, 2, torch.float32)
    for factor in (300.0, -300.0):
        shifted = key.clone()
        shifted[:, :, :20] = factor * query[:, ::2, :1].sign()
        actual, _ = tree_attention(SimpleNamespace(), query, shifted, value, mask)
        expected = dense(query, shifted, value, seen, 0.25)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)  # scores of 1,000: rounded by 1e-4


def test_tree_attention_accepts_any_kernel_output_layout(monkeypatch):
    """The memory-efficient kernel on GPUs, for example, puts tokens before heads."""
    query, key, value, _, seen = inputs(5, 7, 2, torch.float32)
    mask = torch.zeros(5, 12).masked_fill_(~torch.cat([torch.ones(5, 7, dtype=torch.bool), seen], 1), -1e30)
    attend_with_mask = torch.nn.functional.scaled_dot_product_attention

    def transposed(*args, **kwargs):
        return attend_with_mask(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    actual, _ = tree_attention(SimpleNamespace(), query, key, value, mask[None, None])
    torch.testing.assert_close(actual.double(), dense(query, key, value, seen, 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attend_matches_attend_masked(dtype):
    query, key, value, *_ = inputs(40, 200, 1, dtype)
    outputs = [attend(query, key, value, 0.3), attend_masked(query, key, value, None, 0.3)]
    for one, other in zip(*outputs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_other_masks_are_passed_to_sdpa(monkeypatch):
    query, key, value, mask, _ = inputs(5, 8, 2, torch.float32)
    asked = []
    monkeypatch.setattr(module, "sdpa_attention_forward", lambda *args, **kwargs: asked.append(args[4]) or (None, None))
    others = [None, torch.ones(1, 1, 5, 13, dtype=torch.bool), torch.zeros(1, 1, 5, 9)]
    for other in others:
        tree_attention(SimpleNamespace(), query, key, value, other)
    assert all(one is other for one, other in zip(asked, others, strict=True))
    tree_attention(SimpleNamespace(), query, key, value, mask)
    assert len(asked) == len(others)


def test_attention_is_correct_after_the_mask_changes():
    query, key, value, _, _ = inputs(6, 9, 2, torch.float32)
    masks = [torch.zeros(1, 1, 6, 15), torch.zeros(1, 1, 6, 15)]
    masks[1][..., 3:9] = torch.finfo(torch.float32).min
    for mask in (*masks, masks[0]):
        for _ in range(2):
            actual, _ = tree_attention(SimpleNamespace(), query, key, value, mask)
            keys, values = (each.repeat_interleave(2, dim=1) for each in (key, value))
            expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "groups", "length"), thinned(3, TOLERANCES, [1, 2, 4], [(2, 1), (2, 300), (17, 1), (70, 130)])
)
def test_prompt_chunk_attends_to_prefix_and_earlier_tokens(dtype, groups, length):
    num_tokens, num_cached = length
    query, key, value, *_ = inputs(num_tokens, num_cached, groups, dtype)
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    mask = chunk_mask(num_tokens, query.device)
    for scaling in (None, 0.7):
        expected = dense(query, key, value, causal, scaling or 16**-0.5)
        actual, _ = tree_attention(SimpleNamespace(), query, key, value, mask, scaling=scaling)
        assert actual.dtype == dtype and actual.is_contiguous()
        torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_prompt_chunk_supports_values_of_another_head_size():
    query, key, value, *_ = inputs(7, 20, 2, torch.float32)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    mask, shorter = chunk_mask(7, query.device), value[..., :12].contiguous()
    actual, _ = tree_attention(SimpleNamespace(num_key_value_groups=2), query, key, shorter, mask)
    torch.testing.assert_close(actual.double(), dense(query, key, shorter, causal, 0.25), rtol=2e-5, atol=2e-5)


def test_nothing_of_a_mask_is_kept_after_its_step():
    query, key, value, mask, _ = inputs(5, 30, 4, torch.float32)
    mask = torch.cat([mask.new_zeros((1, 1, 5, 30)), mask], -1)
    tree_attention(SimpleNamespace(), query, key, value, mask)
    del mask
    gc.collect()
    shapes = [each.shape for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    assert (1, 1, 20, 35) not in shapes
