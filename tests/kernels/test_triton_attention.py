"""Triton's attention kernels against float64: any lengths, caches at any address, windows, padding."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from support.fed import DEVICE, HEADS, LAYER, NUM_LAYERS, TOLERANCES, Fed, expected_of, feed
from support.thinned import slow, thinned
from torch.nn.functional import rms_norm

from lp_runtime.kernels.types import Rotation
from lp_runtime.model.forward.pass_inputs import Part, PassInputs

kernels = pytest.importorskip("lp_runtime.kernels.triton_gpu", reason="needs Triton")
triton_attention = pytest.importorskip("lp_runtime.kernels.triton_attention", reason="needs Triton")
NO_LIMITS = {"full_attention": (0, 0)}


def inputs_of(fed: list[Fed], num_tokens: int, num_sequences: int, limits: dict) -> PassInputs:
    inputs = PassInputs(num_tokens, num_sequences, NUM_LAYERS, limits, False, DEVICE)
    inputs.fill([Part.whole(each.cache, each.layout) for each in fed])
    return inputs


CASES = {  # (tokens, cached tokens) of each sequence; B; max. number of sequences; groups; head size; (window, chunk)
    "one": ([(1, 1)], 1, 1, 1, 16, (0, 0)),
    "long prefix": ([(1, 300)], 1, 1, 2, 64, (0, 0)),
    "padded": ([(5, 63)], 8, 1, 4, 20, (0, 0)),
    "words": ([(66, 70)], 68, 1, 1, 80, (0, 0)),
    "parts": ([(34, 90)], 34, 1, 1, 16, (0, 0)),
    "one to a head": ([(2, 64)], 2, 1, 2, 128, (0, 0)),
    "wide": ([(40, 1)], 48, 1, 2, 16, (0, 0)),
    "large heads": ([(3, 200)], 4, 1, 1, 256, (0, 0)),
    "batch": ([(1, 9), (7, 130), (3, 40)], 16, 3, 2, 32, (0, 0)),
    "batch with room": ([(33, 5), (1, 64)], 48, 5, 1, 16, (0, 0)),
    "window": ([(6, 100)], 8, 1, 2, 32, (24, 0)),
    "window of a few": ([(20, 70)], 24, 1, 1, 16, (3, 0)),
    "chunks": ([(9, 90)], 16, 1, 2, 16, (0, 32)),
    "batch with windows": ([(5, 200), (4, 3)], 10, 2, 2, 16, (16, 0)),
}


ALWAYS = (  # these differ most
    ("words", 1, torch.float16),
    ("parts", 4, torch.float16),  # the second part begins in the tree
    ("one to a head", 1, torch.float32),
    ("batch", 1, torch.float32),
    ("batch with windows", 4, torch.float32),
)


@pytest.mark.parametrize(
    ("case", "num_processors", "dtype"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.slow)
        for each in itertools.product(CASES, [1, 4, 132], TOLERANCES)
    ],
)
def test_attend_matches_float64_reference(case, num_processors, dtype):
    sizes, num_tokens, num_sequences, groups, size, limits = CASES[case]
    fed = [feed(*each, size, dtype, *limits, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, num_tokens, num_sequences, {"any": limits})
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(1, num_tokens, heads, size, generator=generator) for heads in (groups * HEADS, HEADS, HEADS)]
    query, key, value = (each.to(DEVICE, dtype).transpose(1, 2) for each in states)
    positions, owners, table, words = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    lowest = inputs.masks[0, 0, 0]
    actual = kernels.attend(query, HEADS, lowest, positions, words, table, LAYER, 0.3, num_processors, None)
    assert actual.dtype == dtype and actual.is_contiguous()
    expected = expected_of(query, fed, groups, 0.3)
    assert expected[:, sum(tokens for tokens, _ in sizes) :].eq(0).all()
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("case", "num_processors"), thinned(3, slow(["one to a head", "padded", "batch with windows"], ["padded"]), [1, 4])
)
def test_attend_with_sinks_matches_float64_reference(case, num_processors):
    """The weights of the sinks range from almost none to almost all."""
    sizes, num_tokens, num_sequences, groups, size, limits = CASES[case]
    fed = [feed(*each, size, torch.float32, *limits, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, num_tokens, num_sequences, {"any": limits})
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(1, heads, num_tokens, size, generator=generator) for heads in (groups * HEADS, HEADS, HEADS)]
    query, key, value = (each.to(DEVICE) for each in states)
    sinks = torch.linspace(-30, 30, groups * HEADS, device=DEVICE)
    positions, owners, table, words = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    lowest = inputs.masks[0, 0, 0]
    actual = kernels.attend(query, HEADS, lowest, positions, words, table, LAYER, 0.3, num_processors, sinks)
    expected = expected_of(query, fed, groups, 0.3, sinks)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_cached", "num_written", "num_processors", "num_parts"),
    [
        (140, 2, 4, 6),
        pytest.param(20, 1, 132, triton_attention.MAX_PARTS, marks=pytest.mark.slow),
        pytest.param(32 * 127, 32, 132, triton_attention.MAX_PARTS, marks=pytest.mark.slow),
        pytest.param(32 * 255, 64, 132, triton_attention.MAX_PARTS, marks=pytest.mark.slow),
    ],
)
def test_parts_without_keys_are_neither_written_nor_read(
    num_cached, num_written, num_processors, num_parts, monkeypatch
):
    """Only parts that hold keys are written and read, in a cache with a capacity of more than 64 parts."""
    made = []

    def unwritten(*args, **options):
        """Return memory filled with NaN, or with an impossible number of parts."""
        made.append(torch.full(*args, torch.nan if options["dtype"] != torch.int32 else 1 << 20, **options))
        return made[-1]

    one = feed(1, num_cached, 16, torch.float16, 0, 0, 0)
    one.cache.grow(32 * 256 + 1000)
    inputs = inputs_of([one], 2, 1, NO_LIMITS)  # the second token is padding, which has no part
    query, key, value = torch.randn(3, 1, HEADS, 2, 16, device=DEVICE).half()
    positions, owners, table, words = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: unwritten(shape, **options))
    lowest = inputs.masks[0, 0, 0]
    actual = kernels.attend(query, HEADS, lowest, positions, words, table, LAYER, 0.3, num_processors, None)
    monkeypatch.undo()
    _, output, total, num_used = made
    assert len(total) == num_parts
    assert total[:, 0].isnan().all(1).logical_not().sum() == num_written == num_used[0, 0]
    assert output[num_written:].isnan().all() and total[:, 1].isnan().all() and num_used[1].eq(0).all()
    torch.testing.assert_close(actual.double(), expected_of(query, [one], 1, 0.3), rtol=4e-3, atol=4e-3)


ROTATIONS = {  # by the transformers model with this rotation: ours, and columns of cosines for a head of 64
    "llama": (Rotation(), 64),
    "phi3": (Rotation(), 48),
    "gpt_oss": (Rotation(is_halved=True), 32),
    "glm4": (Rotation(are_neighbors=True), 32),
    "cohere": (Rotation(are_neighbors=True, angle_step=2), 64),
}


WRITTEN = {  # (tokens, cached tokens) of each sequence; groups; head size
    "one": ([(1, 9)], 1, 16),
    "batch": ([(4, 3), (3, 20)], 3, 20),
    "large heads": ([(3, 5)], 2, 64),
}
ALWAYS_WRITTEN = (  # each rotation with all other values, and with heads whose size is not a power of two
    ("llama", "one", True, torch.float32, None),
    ("llama", "batch", False, torch.float16, torch.float32),
    ("phi3", "batch", True, torch.float32, torch.float32),
    ("phi3", "large heads", False, torch.float16, None),
    ("gpt_oss", "one", False, torch.float32, torch.float32),
    ("gpt_oss", "batch", True, torch.float16, None),
    ("glm4", "batch", False, torch.float32, None),
    ("glm4", "large heads", True, torch.float16, torch.float32),
    ("cohere", "one", True, torch.float16, None),
    ("cohere", "batch", False, torch.float32, torch.float32),
)


@pytest.mark.parametrize(
    ("name", "case", "is_apart", "dtype", "weight_dtype"),
    [
        pytest.param(*each, marks=() if each in ALWAYS_WRITTEN else pytest.mark.slow)
        for each in itertools.product(ROTATIONS, WRITTEN, [True, False], TOLERANCES, [None, torch.float32])
    ],
)
def test_rotate_and_write_matches_transformers(name, case, is_apart, dtype, weight_dtype):
    """Queries, keys and values may be separate tensors, or slices of one row per token, and may pass norms first."""
    sizes, groups, size = WRITTEN[case]
    num_tokens = sum(fed for fed, _ in sizes) + 1  # one of them is padding
    rotation, columns = ROTATIONS[name]
    columns = columns * size // 64 // 2 * 2
    apply = importlib.import_module(f"transformers.models.{name}.modeling_{name}").apply_rotary_pos_emb
    heads = (HEADS * groups, HEADS, HEADS)
    fed = [feed(*each, size, dtype, 0, 0, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, num_tokens, len(sizes), NO_LIMITS)
    states = torch.randn(1, num_tokens, sum(heads), size, device=DEVICE).to(dtype)
    query, key, value = ((each.contiguous() if is_apart else each) for each in states.split(heads, 2))
    cos, sin = torch.randn(2, 1, num_tokens, columns, device=DEVICE).to(dtype)
    before = [[each.clone() for each in one.cache.tensors(LAYER)] for one in fed]
    _, owners, table, _ = inputs.device_inputs
    norms = (None, None)
    if weight_dtype is not None:
        norms = tuple(torch.rand(2, size, device=DEVICE, dtype=weight_dtype))
    rotated = kernels.rotate_and_write(query, key, value, cos, sin, owners, table, LAYER, *norms, 1e-3, rotation)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": 2 * TOLERANCES[dtype]}
    if weight_dtype is not None:
        query, key = (
            rms_norm(each.float(), [size], weight.float(), 1e-3).to(dtype)
            for each, weight in zip((query, key), norms, strict=True)
        )
    expected, expected_keys = apply(query, key, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotated, expected, **tolerance)
    first = 0
    for (num_tokens, num_cached), one, caches in zip(sizes, fed, before, strict=True):
        own, new = slice(first, first + num_tokens), slice(num_cached, num_cached + num_tokens)
        keys, values = one.cache.tensors(LAYER)
        torch.testing.assert_close(keys[:, :, new].transpose(1, 2), expected_keys[:, own], **tolerance)
        assert torch.equal(values[:, :, new].transpose(1, 2), value[:, own])
        for memory, old in zip((keys, values), caches, strict=True):
            memory[:, :, new] = torch.nan
            assert torch.equal(memory.nan_to_num(), old.nan_to_num())  # nothing else was written
        first = own.stop


def test_pass_of_padding_only_returns_zeros():
    inputs = inputs_of([], 2, 2, NO_LIMITS)
    states = torch.randn(1, 2, 4 * HEADS, 16, device=DEVICE)
    query, key, value = states.split((2 * HEADS, HEADS, HEADS), 2)
    positions, owners, table, words = inputs.device_inputs
    rotated = kernels.rotate_and_write(
        query, key, value, states[:, :, 0], states[:, :, 1], owners, table, LAYER, None, None, 0.0, Rotation()
    )
    kernels.write(key.transpose(1, 2), value.transpose(1, 2), owners, table, LAYER)
    lowest = inputs.masks[0, 0, 0]
    output = kernels.attend(rotated.transpose(1, 2), HEADS, lowest, positions, words, table, LAYER, 1.0, 2, None)
    assert output.eq(0).all() and table[:, 4:].eq(0).all()


def test_every_tile_gets_a_program():
    """The number of programs suffices for any split into sequences, here a last one after many small ones."""
    sizes = [(1, 2)] * 3 + [(9, 2)]
    fed = [feed(*each, 16, torch.float32, 0, 0, seed) for seed, each in enumerate(sizes)]
    inputs = inputs_of(fed, 12, 4, NO_LIMITS)
    query, key, value = torch.randn(3, 1, HEADS, 12, 16, device=DEVICE)
    positions, owners, table, words = inputs.device_inputs
    kernels.write(key, value, owners, table, LAYER)
    actual = kernels.attend(query, HEADS, inputs.masks[0, 0, 0], positions, words, table, LAYER, 0.3, 1, None)
    torch.testing.assert_close(actual.double(), expected_of(query, fed, 1, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "size", "num_bytes", "num_heads", "num_parts"),
    [
        (64 * 4, 128, 2, 8, 8),  # 4 tiles of 64 rows and 8 heads: 256 programs for 132 multiprocessors
        (64 * 4, 96, 2, 8, 8),
        (1024 * 4, 128, 2, 8, 1),  # there are more tiles than run at once
        (64 * 4, 64, 2, 8, 8),
        (64 * 4, 256, 2, 8, 4),
        (4, 128, 2, 8, 49),  # three of the smallest tiles share a multiprocessor
        (64 * 4, 128, 4, 8, 2),
    ],
)
def test_number_of_parts_fits_one_round_of_programs(num_rows, size, num_bytes, num_heads, num_parts):
    block = triton_attention.blocks(num_rows, size, num_bytes)
    num_tiles = -(-num_rows // block["BLOCK_ROWS"])
    assert triton_attention.parts_of(block, num_heads * num_tiles, 132, num_bytes) == num_parts
