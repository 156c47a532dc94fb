"""Triton's kernels for exactness=strict: compared with float64, and with equal bits in any pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.fed import DEVICE, HEADS, LAYER, NUM_LAYERS, TOLERANCES, Fed, expected_of, feed
from support.thinned import slow, thinned

from lp_runtime.model.attention.strict import BLOCK
from lp_runtime.model.forward.fixed_passes import cut_into_passes
from lp_runtime.model.forward.inputs import InputLayout
from lp_runtime.model.forward.pass_inputs import Part, PassInputs
from lp_runtime.model.kv_cache.cache import TreeCache

kernels = pytest.importorskip("lp_runtime.kernels.triton_gpu", reason="needs Triton")


@pytest.fixture(autouse=True)
def same_bits_in_any_row(monkeypatch):
    """Triton's interpreter multiplies with numpy's BLAS, which sums some rows in another order on some CPUs."""
    if DEVICE.type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            products = a.data[:, :, None].astype(d.data.dtype) * b.data[None].astype(d.data.dtype)
            return TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def attend(parts: list[Part], states, size: int, num_sequences: int, window: int = 0, sinks=None) -> torch.Tensor:
    """Return the attention output of one pass, [1, B, heads, D].

    `states` are the queries, keys and values of the pass's tokens, [T, heads, D] each.
    """
    limits = {"any": (window, 0)}
    inputs = PassInputs(size, num_sequences, NUM_LAYERS, limits, False, DEVICE, 1 + BLOCK)
    inputs.fill(parts)
    padded = (torch.nn.functional.pad(each, (0, 0, 0, 0, 0, size - len(each))) for each in states)
    query, key, value = (each[None].to(DEVICE).transpose(1, 2) for each in padded)
    positions, owners, table, paths = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    lowest = inputs.masks[0, 0, 0]
    return kernels.attend_strictly(query, HEADS, lowest, positions, paths, owners, table, LAYER, 0.3, sinks)


def states_of(num_tokens: int, groups: int, size: int, dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (groups * HEADS, HEADS, HEADS)
    return [torch.randn(num_tokens, each, size, generator=generator).to(dtype) for each in heads]


def whole(fed: list[Fed], size: int) -> list[Part]:
    (parts,) = cut_into_passes([Part.whole(each.cache, each.layout) for each in fed], size, 16)
    return parts


CASES = {  # (tokens, cached tokens) of each sequence; B; groups; head size; window
    "one": ([(1, 1)], 1, 1, 16, 0),
    "two blocks": ([(1, 2 * BLOCK - 1)], 2, 2, 64, 0),
    "more blocks than parts": ([(2, 20 * BLOCK - 1)], 2, 1, 16, 0),
    "across a border": ([(9, 5 * BLOCK - 2)], 9, 4, 20, 0),
    "large heads": ([(1, 200)], 2, 1, 256, 0),
    "batch": ([(1, 9), (2, 130), (1, 320)], 5, 2, 32, 0),
    "window": ([(4, 250)], 5, 2, 16, 100),
    "window of a few": ([(2, 3 * BLOCK), (1, 3)], 3, 1, 16, 3),
}
# They take seconds each; the others have most of their claims.
ALSO_SLOW = ("two blocks", "more blocks than parts", "across a border", "large heads", "batch", "window")


@pytest.mark.parametrize(("case", "dtype"), thinned(9, slow(CASES, ALSO_SLOW), TOLERANCES))
def test_strict_attention_matches_float64_reference(case, dtype):
    """Every other case has attention sinks."""
    has_sinks = list(CASES).index(case) % 2 == 1
    sizes, num_tokens, groups, size, window = CASES[case]
    fed = [feed(*each, size, dtype, window, 0, seed) for seed, each in enumerate(sizes)]
    states = states_of(sum(tokens for tokens, _ in sizes), groups, size, dtype)
    sinks = torch.linspace(-9, 9, groups * HEADS, device=DEVICE).to(dtype) if has_sinks else None
    actual = attend(whole(fed, num_tokens), states, num_tokens, len(sizes), window, sinks)
    assert actual.dtype == dtype and actual.is_contiguous()
    query = torch.nn.functional.pad(states[0], (0, 0, 0, 0, 0, num_tokens - len(states[0])))[None].transpose(1, 2)
    expected = expected_of(query.to(DEVICE), fed, groups, 0.3, sinks)
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def path_fed(length: int, others: list[int], size: int, dtype: torch.dtype, path: list, seed: int, capacity: int):
    """Return (part, states, places of the path's tokens) for a path among other branches.

    Args:
        length: number of committed tokens; their keys and values are always the same.
        others: numbers of tokens of other branches that are fed after each token of the path; used cyclically.
        size: head size.
        dtype: dtype of all tensors.
        path: queries, keys and values of the path's tokens, [n, heads, D] each.
        seed: seed of the states of the other branches.
        capacity: capacity of the cache in tokens.
    """
    generator = torch.Generator().manual_seed(7)
    cache = TreeCache(NUM_LAYERS, capacity)
    for layer in range(NUM_LAYERS):
        cache.update(*(torch.randn(1, HEADS, length, size, generator=generator).to(DEVICE, dtype) for _ in "kv"), layer)
    cache.commit(length)
    parents, places, own = [], [], [-1]
    for number in range(len(path[0])):
        below = own[-1]
        own.append(len(parents))
        parents.append(below)
        places.append(own[-1])
        for other in range(others[number % len(others)]):
            parents.append(own[-1] if other % 3 else len(parents) - 1)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    states = states_of(len(parents), len(path[0][0]) // HEADS, size, dtype, seed)
    for all_states, own_states in zip(states, path, strict=True):
        all_states[places] = own_states
    tokens, rows = np.arange(len(parents)), np.array(places)
    return Part.whole(cache, InputLayout(tokens, np.array(depths) + length, np.array(parents), rows)), states, places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "window", "dtype"),
    [
        pytest.param(20, 0, torch.float16, marks=pytest.mark.slow),
        pytest.param(3 * BLOCK - 1, 0, torch.float32, marks=pytest.mark.slow),
        pytest.param(18 * BLOCK + 9, 0, torch.float16, marks=pytest.mark.slow),
        (300, 70, torch.float16),
    ],
)
def test_bits_depend_only_on_the_path(length, window, dtype):
    """The path is fed token by token, in trees of several sizes, and split across passes.

    Other sequences are fed in the same passes, in any order.
    """
    size, groups, num_path = 32, 2, 3
    path = states_of(num_path, groups, size, dtype, seed=3)
    results = []

    alone, _, _ = path_fed(length, [0], size, dtype, path, 0, length + 64)
    for number in range(num_path):
        layout = InputLayout(*(np.array([each]) for each in (0, length + number, -1, 0)))
        (parts,) = cut_into_passes([Part.whole(alone.cache, layout)], 1, 16)
        results.append(attend(parts, [each[number : number + 1] for each in path], 1, 1, window)[0, 0])
        alone.cache.commit(1)

    for others, num_tokens, neighbours in (([2, 0], 24, 2), ([1], 5, 1)):
        part, states, places = path_fed(length, others, size, dtype, path, 4, length + 500)
        parts, all_states, first = [part], [states], 0
        for seed in range(neighbours):  # the first goes before the path's sequence, the second after it
            other = feed(3 + seed, 11 + 200 * seed, size, dtype, window, 0, seed)
            parts.insert(0 if seed == 0 else 2, Part.whole(other.cache, other.layout))
            all_states.insert(0 if seed == 0 else 2, states_of(3 + seed, groups, size, dtype, seed=9))
            first += 3 if seed == 0 else 0
        joined = [torch.cat(each) for each in zip(*all_states, strict=True)]
        outputs, start = [], 0
        for pieces in cut_into_passes(parts, num_tokens, 16):
            count = sum(len(piece.layout.tokens) for piece in pieces)
            own = [each[start : start + count] for each in joined]
            outputs.append(attend(pieces, own, num_tokens, 16, window)[0, :count])
            start += count
        output = torch.cat(outputs)
        assert start == len(joined[0]) and (len(outputs) > 1) == (num_tokens == 5)
        for number, place in enumerate(places):
            assert torch.equal(output[first + place], results[number]), (others, number)


def test_pass_of_padding_only_returns_zeros():
    states = [torch.randn(2, heads, 16) for heads in (2 * HEADS, HEADS, HEADS)]
    assert attend([], states, 2, 2).eq(0).all()


@pytest.mark.slow
def test_parts_without_blocks_are_neither_written_nor_read(monkeypatch):
    """After 5 blocks, 3 of the head's 16 parts have a block; for a padding token none has."""
    one = feed(1, 5 * BLOCK, 16, torch.float32, 0, 0, 0)
    made = []

    def unwritten(shape, **options):
        made.append(torch.full(shape, torch.nan, **options))
        return made[-1]

    states = states_of(1, 1, 16, torch.float32)
    parts = whole([one], 2)
    monkeypatch.setattr(torch, "empty", unwritten)
    actual = attend(parts, states, 2, 1)
    monkeypatch.undo()
    (output, total) = made[-2:]
    assert total[:4, 0].isfinite().all() and total[4:].isnan().all() and total[:, 1].isnan().all()
    assert output[4:].isnan().all() and actual.isfinite().all()
