"""Attention masks of token trees and of prompt chunks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_runtime.model.attention.mask import MaskBuilder, MaskForm
from lp_runtime.model.attention.mask_rows import ancestor_mask
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.attention.tree_attention import window_of

CPU = torch.device("cpu")
# Two pending tokens, then a branch of two tokens and a branch of one.
PARENTS = [-1, 0, 1, 2, 1]
POSITIONS = torch.tensor([4, 5, 6, 7, 6])
FULL = [
    [1, 1, 1, 1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1, 1, 0, 0, 1],
]
WINDOW_OF_3 = [
    [0, 0, 1, 1, 1, 0, 0, 0, 0],
    [0, 0, 0, 1, 1, 1, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 1, 0, 0],
    [0, 0, 0, 0, 0, 1, 1, 1, 0],
    [0, 0, 0, 0, 1, 1, 0, 0, 1],
]


def build(attention="sdpa", dtype=torch.float32, **config):
    return MaskBuilder(SimpleNamespace(**config), attention, dtype, CPU).build(PARENTS, POSITIONS, num_cached=4)


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(0, 100), max_size=15))
def test_node_sees_itself_and_its_ancestors(choices):
    parents = [choice % (node + 1) - 1 for node, choice in enumerate(choices)]
    mask = ancestor_mask(parents)
    for node in range(len(parents)):
        ancestors = set()
        above = node
        while above >= 0:
            ancestors.add(above)
            above = parents[above]
        assert set(mask[node].nonzero()[0]) == ancestors


def test_sdpa_mask_is_boolean():
    mask = build()
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == FULL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eager_mask_is_additive(dtype):
    mask = build("eager", dtype)
    assert mask.dtype == dtype
    assert (mask == 0).int()[0, 0].tolist() == FULL
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_mask_hides_tokens_outside_the_sliding_window():
    assert build(sliding_window=3)[0, 0].int().tolist() == WINDOW_OF_3
    assert build(sliding_window=None)[0, 0].int().tolist() == FULL
    assert build(sliding_window=100)[0, 0].int().tolist() == FULL


def test_masks_are_built_per_layer_type():
    masks = build(sliding_window=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    assert {kind: mask[0, 0].int().tolist() for kind, mask in masks.items()} == {
        "sliding_attention": WINDOW_OF_3,
        "full_attention": FULL,
    }


def test_full_attention_mask_ignores_the_configured_sliding_window():
    assert build(sliding_window=3, layer_types=["full_attention"])[0, 0].int().tolist() == FULL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tree_only_mask_omits_the_prefix_except_for_sliding_layers(dtype):
    """A layer that hides committed tokens gets a boolean mask of all keys instead."""
    config = SimpleNamespace(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
    builder = MaskBuilder(config, TREE, dtype, CPU)
    assert builder.is_own and builder.form is MaskForm.ADDITIVE
    builder.form = MaskForm.TREE_ONLY
    masks = builder.build(PARENTS, POSITIONS, num_cached=4)
    assert masks["sliding_attention"].dtype == torch.bool
    assert masks["sliding_attention"][0, 0].int().tolist() == WINDOW_OF_3
    assert masks["full_attention"].dtype == dtype
    assert (masks["full_attention"] == 0)[0, 0].int().tolist() == [row[4:] for row in FULL]


@pytest.mark.parametrize(("attention", "num_cached", "num_tokens"), [("sdpa", 4, 5), ("eager", 4, 5), (TREE, 0, 5)])
def test_chunk_mask_is_none_if_the_models_causal_mask_suffices(attention, num_cached, num_tokens):
    builder = MaskBuilder(SimpleNamespace(), attention, torch.float32, CPU)
    assert builder.build_chunk(torch.arange(num_cached, num_cached + num_tokens), num_cached) is None


def test_chunk_mask_carries_the_window_of_each_layer_type():
    config = SimpleNamespace(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
    builder = MaskBuilder(config, TREE, torch.float32, CPU)
    for num_cached, num_tokens, windows in (
        (4, 2, {"sliding_attention": 3, "full_attention": 0}),
        (1, 2, {"sliding_attention": 0, "full_attention": 0}),  # nothing is hidden yet
        (0, 5, {"sliding_attention": 3, "full_attention": 0}),  # the prompt's first chunk
        (9, 1, {"sliding_attention": 3, "full_attention": 0}),
    ):
        masks = builder.build_chunk(torch.arange(num_cached, num_cached + num_tokens), num_cached)
        assert {kind: window_of(mask) for kind, mask in masks.items()} == windows
        assert all(mask.shape[2:] == (num_tokens, 0) for mask in masks.values())
    assert builder.build_chunk(torch.arange(3), 0) is None


def test_chunk_mask_is_explicit_for_chunked_attention():
    config = SimpleNamespace(attention_chunk_size=3, layer_types=["chunked_attention"])
    builder = MaskBuilder(config, TREE, torch.float32, CPU)
    builder.form = MaskForm.TREE_ONLY
    masks = builder.build_chunk(torch.arange(4, 7), 4)
    assert masks["chunked_attention"][0, 0].int().tolist() == [
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
