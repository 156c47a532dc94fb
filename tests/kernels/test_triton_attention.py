"""Triton's attention kernels against float64: sequences of any length, caches anywhere, windows, padding."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lp_runtime.model.attention.mask import ancestor_mask
from lp_runtime.model.inputs import InputLayout
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.optimize.fused_blocks import rotate
from lp_runtime.model.pass_inputs import PassInputs

kernels = pytest.importorskip("lp_runtime.kernels.triton_gpu", reason="needs Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no products in bfloat16
if DEVICE.type == "cuda":
    TOLERANCES[torch.bfloat16] = 3e-2
HEADS = 2
NUM_LAYERS = 2
LAYER = 1
NO_LIMITS = {"full_attention": (0, 0)}


class Fed(NamedTuple):
    """What is fed of a sequence: its layout, its cache, and which keys each of its tokens sees, [T, L + T] bool."""

    layout: InputLayout
    cache: TreeCache
    seen: torch.Tensor


def feed(num_tokens: int, num_cached: int, size: int, dtype: torch.dtype, window: int, chunk: int, seed: int) -> Fed:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parents = np.array([-1, *(rng.randrange(node) for node in range(1, num_tokens))])
    depths = np.zeros(num_tokens, np.int64)
    for node in range(1, num_tokens):
        depths[node] = depths[parents[node]] + 1
    positions, tokens = num_cached + depths, np.arange(num_tokens)
    capacity = num_cached + num_tokens + rng.randrange(70)
    cache = TreeCache(NUM_LAYERS, capacity)
    for layer in range(NUM_LAYERS):
        states = (torch.randn(1, HEADS, num_cached, size, generator=generator).to(DEVICE, dtype) for _ in range(2))
        cache.update(*states, layer)
        for memory in cache.tensors(layer):
            memory[:, :, num_cached:] = torch.nan  # anything may be there
    cache.commit(num_cached)
    ancestors = torch.from_numpy(ancestor_mask(parents))
    seen = torch.cat([torch.ones(num_tokens, num_cached, dtype=torch.bool), ancestors], 1)
    at = torch.from_numpy(np.concatenate([np.arange(num_cached), positions]))
    own = torch.from_numpy(positions)[:, None]
    if window:
        seen &= own - at < window
    if chunk:
        seen &= own // chunk == at // chunk
    return Fed(InputLayout(tokens, positions, parents, tokens), cache, seen.to(DEVICE))


def inputs_of(fed: list[Fed], num_tokens: int, num_sequences: int, limits: dict) -> PassInputs:
    inputs = PassInputs(num_tokens, num_sequences, NUM_LAYERS, limits, False, DEVICE)
    inputs.fill([(each.cache, each.layout) for each in fed])
    return inputs


def expected_of(query: torch.Tensor, fed: list[Fed], groups: int, scale: float) -> torch.Tensor:
    """[1, B, heads, D] float64, by the definition; 0 for padding."""
    expected, first = torch.zeros(query.transpose(1, 2).shape, dtype=torch.float64, device=DEVICE), 0
    for layout, cache, seen in fed:
        own, count = slice(first, first + len(layout.tokens)), seen.shape[1]
        keys, values = (each[:, :, :count].double().repeat_interleave(groups, 1) for each in cache.tensors(LAYER))
        scores = query[:, :, own].double() @ keys.transpose(2, 3) * scale
        expected[:, own] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(1, 2)
        first = own.stop
    return expected


CASES = {  # (tokens, cached tokens) of each sequence, B, sequences at most, groups, size, (window, chunk)
    "one": ([(1, 1)], 1, 1, 1, 16, (0, 0)),
    "long prefix": ([(1, 300)], 1, 1, 2, 64, (0, 0)),
    "padded": ([(5, 63)], 8, 1, 4, 20, (0, 0)),
    "words": ([(70, 70)], 96, 1, 1, 80, (0, 0)),
    "one to a head": ([(2, 64)], 2, 1, 2, 128, (0, 0)),
    "wide": ([(40, 1)], 48, 1, 2, 16, (0, 0)),
    "large heads": ([(3, 200)], 4, 1, 1, 256, (0, 0)),
    "batch": ([(1, 9), (7, 130), (3, 40)], 16, 3, 2, 32, (0, 0)),
    "batch with room": ([(33, 5), (1, 64)], 48, 5, 1, 16, (0, 0)),
    "window": ([(6, 100)], 8, 1, 2, 32, (24, 0)),
    "window of a few": ([(20, 70)], 24, 1, 1, 16, (3, 0)),
    "chunks": ([(9, 90)], 16, 1, 2, 16, (0, 32)),
    "batch with windows": ([(5, 200), (4, 3)], 16, 2, 2, 16, (16, 0)),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_processors", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, num_processors, dtype):
    sizes, num_tokens, num_sequences, groups, size, limits = CASES[case]
    fed = [feed(*each, size, dtype, *limits, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, num_tokens, num_sequences, {"any": limits})
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(1, num_tokens, heads, size, generator=generator) for heads in (groups * HEADS, HEADS, HEADS)]
    query, key, value = (each.to(DEVICE, dtype).transpose(1, 2) for each in states)
    positions, owners, table, words = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    lowest = inputs.masks[0, 0, 0]
    actual = kernels.attend(query, HEADS, lowest, positions, words, table, LAYER, 0.3, num_processors)
    assert actual.dtype == dtype and actual.is_contiguous()
    expected = expected_of(query, fed, groups, 0.3)
    assert expected[:, sum(tokens for tokens, _ in sizes) :].eq(0).all()
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize(
    ("sizes", "groups", "size"), [([(1, 9)], 1, 16), ([(4, 3), (3, 20)], 3, 20), ([(3, 5)], 2, 64)]
)
def test_rotating_and_writing(sizes, groups, size, is_apart, dtype):
    """Queries, keys and values may lie apart, or in one row for each token."""
    heads = (HEADS * groups, HEADS, HEADS)
    fed = [feed(*each, size, dtype, 0, 0, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, 8, len(sizes), NO_LIMITS)
    states = torch.randn(1, 8, sum(heads), size, device=DEVICE).to(dtype)
    query, key, value = ((each.contiguous() if is_apart else each) for each in states.split(heads, 2))
    cos, sin = torch.randn(2, 1, 8, size, device=DEVICE).to(dtype)
    before = [[each.clone() for each in one.cache.tensors(LAYER)] for one in fed]
    _, owners, table, _ = inputs.device_inputs
    rotated = kernels.rotate_and_write(query, key, value, cos, sin, owners, table, LAYER)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": 2 * TOLERANCES[dtype]}
    torch.testing.assert_close(rotated, rotate(query, cos, sin), **tolerance)
    first = 0
    for (num_tokens, num_cached), one, caches in zip(sizes, fed, before, strict=True):
        own, new = slice(first, first + num_tokens), slice(num_cached, num_cached + num_tokens)
        keys, values = one.cache.tensors(LAYER)
        torch.testing.assert_close(keys[:, :, new].transpose(1, 2), rotate(key, cos, sin)[:, own], **tolerance)
        assert torch.equal(values[:, :, new].transpose(1, 2), value[:, own])
        for memory, old in zip((keys, values), caches, strict=True):
            memory[:, :, new] = torch.nan
            assert torch.equal(memory.nan_to_num(), old.nan_to_num())  # nothing else was written
        first = own.stop


def test_padding_alone_touches_no_cache():
    inputs = inputs_of([], 4, 2, NO_LIMITS)
    states = torch.randn(1, 4, 4 * HEADS, 16, device=DEVICE)
    query, key, value = states.split((2 * HEADS, HEADS, HEADS), 2)
    positions, owners, table, words = inputs.device_inputs
    rotated = kernels.rotate_and_write(query, key, value, states[:, :, 0], states[:, :, 1], owners, table, LAYER)
    kernels.write(key.transpose(1, 2), value.transpose(1, 2), owners, table, LAYER)
    lowest = inputs.masks[0, 0, 0]
    output = kernels.attend(rotated.transpose(1, 2), HEADS, lowest, positions, words, table, LAYER, 1.0, 8)
    assert output.eq(0).all() and table[:, 4:].eq(0).all()


def test_a_program_for_every_tile():
    """However tokens are cut into sequences: the last of many small ones is attended to, too."""
    sizes = [(1, 2)] * 7 + [(9, 2)]
    fed = [feed(*each, 16, torch.float32, 0, 0, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, 16, 8, NO_LIMITS)
    query, key, value = torch.randn(3, 1, HEADS, 16, 16, device=DEVICE)
    positions, owners, table, words = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    actual = kernels.attend(query, HEADS, inputs.masks[0, 0, 0], positions, words, table, LAYER, 0.3, 1)
    torch.testing.assert_close(actual.double(), expected_of(query, fed, 1, 0.3), rtol=1e-5, atol=1e-5)
