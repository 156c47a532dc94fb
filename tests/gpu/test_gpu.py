"""Features that need a GPU: captured passes, flash attention; skipped if there is none.

Triton's kernels are tested with and without a GPU, in tests/kernels/test_triton_gpu.py.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from support.one_slot import OneSlot

from lp_runtime import LookaheadConfig, LookaheadRuntime, lookahead_generate
from lp_runtime.config.settings import LauncherConfig, ModelConfig
from lp_runtime.distributed.exchange import Exchange
from lp_runtime.distributed.partition.partition import Shares
from lp_runtime.distributed.transport.group import Group
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention.parts import attend, attend_masked
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.forward.cuda_graph import why_uncapturable
from lp_runtime.model.forward.fixed_passes import SIZES
from lp_runtime.model.forward.pass_timer import PassTimer
from lp_runtime.model.loading.loader import load_model, load_tokenizer
from lp_runtime.model.modules.fusing import fuse_blocks
from lp_runtime.model.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TEXT = "def fibonacci(n):\n"


def demo(dtype: str) -> OneSlot:
    return OneSlot(ModelRunner(load_model(ModelConfig(), torch.device("cuda"), dtype), 512, own_attention=True))


def random_tree(rng: random.Random, size: int) -> TokenTree:
    tree = TokenTree([rng.randrange(500)], max_depth=16)
    while len(tree) < size:
        tree.add(rng.randrange(len(tree)), rng.randrange(500))
    return tree


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attend_without_a_mask_matches_attend_masked(groups, dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 64, generator=generator).to("cuda", dtype)
        for heads, tokens in ((2 * groups, 17), (2, 300), (2, 300))
    )
    folded = query.reshape(1, 2, groups * 17, 64)
    expected, total = attend_masked(folded, key[:, :, :130], value[:, :, :130], None, 0.2)
    actual, actual_total = attend(folded, key[:, :, :130], value[:, :, :130], 0.2)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(actual.float(), expected, **tolerance)
    torch.testing.assert_close(actual_total, total, **tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.02), ("float32", 1e-4)])
@torch.inference_mode()
def test_captured_passes_match_uncaptured_passes(dtype, tolerance):
    """The demo model has grouped queries."""
    free, captured = demo(dtype), demo(dtype)
    assert why_uncapturable(captured.model) is None
    assert fuse_blocks(captured.model)
    captured.enable_graphs(capture=True)
    assert check_model(captured.runner) < 2 * tolerance
    rng = random.Random(0)
    prompt = [rng.randrange(500) for _ in range(200)]
    for model in (free, captured):
        model.begin(len(prompt) + SIZES[-1] + 100)
        model.prefill(prompt)
    for size in (*SIZES, *SIZES[::-1], 300):
        tree = random_tree(rng, size)
        nodes = list(range(len(tree)))
        one, other = (model.forward(tree, nodes, nodes) for model in (free, captured))
        assert (one - other).norm() <= tolerance * one.norm()


def test_captured_passes_are_repeatable_after_a_longer_text():
    model = demo("bfloat16")
    model.enable_graphs(capture=True)
    for length in (100, 3000, 50):
        model.begin(length + 64)
        model.prefill([7] * length)
        tree = random_tree(random.Random(length), 30)
        nodes = list(range(30))
        first = model.forward(tree, nodes, nodes, commit=False)
        assert torch.isfinite(first).all() and torch.equal(first, model.forward(tree, nodes, nodes))


def test_greedy_decoding_matches_generate():
    """One float32 replica decodes with lookahead settings of several sizes."""
    tokenizer = load_tokenizer(ModelConfig())
    model = load_model(ModelConfig(), torch.device("cuda"), "float32")
    model.generation_config.eos_token_id = None
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids.cuda()
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=96)
    expected = expected[0, ids.shape[1] :].tolist()
    with LookaheadRuntime(device="cuda", dtype="float32") as runtime:
        for settings in ({}, {"W": 15, "N": 5, "G": 15}, {"W": 0, "N": 2, "G": 0}):
            done = runtime.generate(ids[0].tolist(), 96, eos=False, lookahead=LookaheadConfig(**settings))
            assert done.token_ids == expected


def test_custom_generate_matches_generate():
    """The model runs in transformers' `generate`, where nothing is fused or captured."""
    tokenizer = load_tokenizer(ModelConfig())
    model = load_model(ModelConfig(), torch.device("cuda"), "float32")
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids.cuda()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 64}
    assert torch.equal(
        model.generate(ids, custom_generate=lookahead_generate, **options), model.generate(ids, **options)
    )


def test_strict_bfloat16_matches_single_token_steps():
    outputs = []
    with LookaheadRuntime(device="cuda", dtype="bfloat16", exactness="strict") as runtime:
        for settings in ({"W": 7, "N": 5, "G": 7}, {"W": 0, "N": 2, "G": 0}):
            outputs.append(runtime.generate(TEXT, 96, eos=False, lookahead=LookaheadConfig(**settings)).token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("gpus", [2, 3])
def test_replicas_sharing_a_gpu_match_one_replica(gpus):
    with LookaheadRuntime(device="cuda", dtype="float32") as runtime:
        expected = runtime.generate(TEXT, 64, eos=False).token_ids
    launcher = LauncherConfig(name="local", backend="gloo")
    with LookaheadRuntime(device="cuda", dtype="float32", gpus=gpus, launcher=launcher) as runtime:
        assert runtime.generate(TEXT, 64, eos=False).token_ids == expected


def test_exchange_waits_once_in_finish():
    """The exchange starts while the GPU computes its values; the timer reports how long that took."""
    timer = PassTimer(torch.device("cuda"))
    exchange = Exchange(Group.alone(), 64, 5)
    started = torch.cuda.Event()
    nodes = np.arange(40)
    shares = Shares(np.zeros(40, np.int64), nodes, nodes, [40], [40])
    for number in range(4):  # the first loads kernels and pins memory, which may wait
        timer.start()
        torch.cuda._sleep(50_000_000 if number else 1)
        values = torch.arange(200, device="cuda").view(40, 5) + number
        timer.stop()
        exchange.start(shares, values, digest=1, control=0)
        started.record()
        assert number == 0 or not started.query()  # start() has not waited for the GPU
        outcome = exchange.finish()
        assert (outcome.values == np.arange(200).reshape(40, 5) + number).all()
        assert number == 0 or timer.seconds() > 0.005


def test_slow_reader_gets_the_same_text():
    with LookaheadRuntime(device="cuda", dtype="float32") as runtime:
        expected = runtime.generate(TEXT, 64, eos=False).token_ids
        tokens = []
        for piece in runtime.stream(TEXT, 64, eos=False):
            tokens += piece.token_ids
            time.sleep(0.02)
        assert tokens == expected
