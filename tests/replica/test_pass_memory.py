"""The capacity of a GPU with measured passes: weights, that many tokens, and any pass fit together."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gpu_memory import gpu_of_size
from support.small_models import FAMILIES, random_model

from lp_runtime.calibration.step_meter import dummy_tree, make_greedy_sampler
from lp_runtime.decoder.sampler_factory import make_sampler
from lp_runtime.model.attention import parts
from lp_runtime.model.capacity import capacity_in_tokens, tokens_in
from lp_runtime.model.forward.passes import Pretend
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import OVERHEAD_TOKENS, CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.pass_memory import SAMPLING, measure_pass_bytes

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CUDA = torch.device("cuda", 0)
CHUNK = 256
CONTEXT = 1 << 14
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: FAMILIES[name] for name in ("llama", "mistral", "gemma3", "gpt_oss")
} | {"large vocabulary": ("Llama", {"vocab_size": 8000}), "eager": ("Llama", {"attention": "eager"})}
GPU_BYTES = 1 << 26


def runner(name: str, dtype: torch.dtype) -> ModelRunner:
    """Return a model whose slots have a known size per token."""
    family, settings = MODELS[name]
    whole = random_model(family, max_position_embeddings=CONTEXT, **settings).to(dtype)
    model = ModelRunner(whole.to(CUDA), CHUNK, own_attention=True)
    with model.slots.borrowed() as slot:
        model.begin(slot, 16)
        model.prefill(slot, [1, 2, 3])
    return model


def run_largest_passes(model: ModelRunner, slot: CacheSlot) -> None:
    """Run at the end of a full slot: a chunk, with and without all logits, and a step with penalties."""

    def leave(num_tokens: int) -> int:
        length = slot.capacity - num_tokens
        slot.cache.place_at(length, 0)
        slot.tokens = [0] * length
        return length

    leave(CHUNK)
    model.feed_prompt(slot, [1] * CHUNK)
    leave(CHUNK)
    make_greedy_sampler(model).pack_candidates(model.feed_prompt(slot, [1] * CHUNK, range(CHUNK)))
    nodes = range(128)
    length = leave(len(nodes))
    tree = dummy_tree(len(nodes), 8, model.vocabulary_size)
    actual = model.forward(StepInputs(slot, tree, nodes, nodes), any_size=True)
    replace(make_sampler(model, SAMPLING), num_top_k=8).sample(actual, tree, nodes, [0] * length)


CASES = [*((name, torch.bfloat16) for name in MODELS), ("gpt_oss", torch.float32)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*case, marks=pytest.mark.slow if place > 0 else ()) for place, case in enumerate(CASES)],
)
def test_capacity_leaves_just_enough_memory_for_any_pass(name, dtype):
    """Slots that fill the capacity, one as long as a text can be, leave enough memory for any pass."""
    parts.flash_has_windows.cache_clear()
    with gpu_of_size(GPU_BYTES) as (_, memory):
        model = runner(name, dtype)
        pass_bytes = measure_pass_bytes(model)
        model.slots.clear()
        weights, capacity = memory.live, capacity_in_tokens(model, 1, pass_bytes=pass_bytes)
        slots = [CacheSlot(), CacheSlot()]
        num_long = min(CONTEXT, capacity // 2 + OVERHEAD_TOKENS)
        for slot, size in zip(slots, (num_long, capacity + OVERHEAD_TOKENS - num_long), strict=True):
            model.begin(slot, size)
            model.prefill(slot, [1])
        model.feed(Pretend(num_long), [slots[0].cache])
        filled = memory.live
        memory.reset_peak()
        run_largest_passes(model, slots[0])
        peak = memory.peak - filled
        token_bytes = model.cache_bytes_per_token
        assert filled == weights + (capacity + OVERHEAD_TOKENS) * token_bytes
        assert filled + peak <= GPU_BYTES
        if name != "eager":  # it has scores of all keys: a text half as long needs half of the memory that is kept free
            assert filled + peak > 0.96 * GPU_BYTES
        unmeasured = tokens_in(GPU_BYTES - weights, token_bytes)  # a tenth is kept free
        assert weights + unmeasured * token_bytes + peak > GPU_BYTES


def test_nearly_full_gpu_is_not_measured(caplog):
    """The capacity of such a GPU leaves a tenth of the free memory."""
    with gpu_of_size(GPU_BYTES) as (gpu, memory):
        model = runner("large vocabulary", torch.bfloat16)
        memory.total = memory.live + (1 << 20)
        assert measure_pass_bytes(model) is None
    assert "too little is free to measure" in caplog.text
