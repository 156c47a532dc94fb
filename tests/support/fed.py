"""Random trees after random committed tokens, for attention kernels, and attention by its definition."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch

from lp_runtime.model.attention.mask_rows import ancestor_mask
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.kv_cache.cache import TreeCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter cannot multiply in bfloat16
if DEVICE.type == "cuda":
    TOLERANCES[torch.bfloat16] = 3e-2
HEADS = 2
NUM_LAYERS = 2
LAYER = 1


class Fed(NamedTuple):
    """The fed tokens of a sequence: layout, cache, and the keys that each token sees, [T, L + T] bool."""

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
            memory[:, :, num_cached:] = torch.nan  # unwritten memory may hold anything
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


def expected_of(
    query: torch.Tensor, fed: list[Fed], groups: int, scale: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [1, B, heads, D] float64 attention by its definition; 0 for padding."""
    expected, first = torch.zeros(query.transpose(1, 2).shape, dtype=torch.float64, device=DEVICE), 0
    for layout, cache, seen in fed:
        own, count = slice(first, first + len(layout.tokens)), seen.shape[1]
        keys, values = (each[:, :, :count].double().repeat_interleave(groups, 1) for each in cache.tensors(LAYER))
        scores = query[:, :, own].double() @ keys.transpose(2, 3) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:  # a sink is a key whose value is 0
            own_sinks = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, own_sinks], -1)
            values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        expected[:, own] = (scores.softmax(-1) @ values).transpose(1, 2)
        first = own.stop
    return expected
