"""Models that are fed chains: their states are the same as if only the text had been fed."""

import numpy as np
import pytest
import torch
from support.causal_configs import small_config
from support.causal_types import small_model
from support.chain_models import RECURRENT, model_of
from support.small_models import random_model
from support.thinned import slow

from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.chain_runner import ChainRunner
from lp_runtime.model.checks.chain_check import check_chains
from lp_runtime.model.checks.make_runner import check_runner, make_runner
from lp_runtime.model.forward.by_generate import FeedByGenerate
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.hf.differences import TOLERANCES, difference_of
from lp_runtime.model.kv_cache.cache import TreeCache
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.kv_cache.states import StateCache
from lp_runtime.model.runner import ModelRunner
from lp_runtime.prefill.prefix import make_prefix_cache
from lp_runtime.utils.callables import result_of

# No recurrent states, but in this order: ALiBi, positions by place, an indexer, no position_ids.
OTHERS = ("bloom", "gpt_neo", "deepseek_v32", "bart")


# One of each kind of layer: DeltaNet, short convolutions, Mamba 2, KDA; and of OTHERS.
ALWAYS = ("qwen3_next", "lfm2_moe", "bamba", "kimi_linear", "bloom", "deepseek_v32")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.slow) for each in (*RECURRENT, *OTHERS)],
)
def test_model_that_continues_from_its_cache_passes_the_check(model_type):
    runner = make_runner(small_model(small_config(model_type), seed=1), prefill_chunk=7)
    assert runner.feeds_chains
    assert check_runner(runner) < 0.5 * TOLERANCES[torch.float32]


# Limits of a time step that change every token. transformers applies them to prompts, not to single tokens after them.
LIMITED = ("falcon_h1", {"time_step_limit": (0.5, 0.6)})


def limited_runner() -> ChainRunner:
    return ChainRunner(small_model(small_config(*LIMITED), seed=1), 7)


def test_time_steps_are_limited_as_in_generate():
    assert check_chains(limited_runner()) < 0.5 * TOLERANCES[torch.float32]


@pytest.mark.parametrize("num_prompt", [12, 15], ids=["two chunks", "two chunks and a token"])
def test_resumed_text_has_limited_time_steps_in_its_prompt_only(num_prompt):
    runner = limited_runner()
    text = torch.randint(8, runner.vocabulary_size, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = runner.feed(FeedByGenerate(text, num_prompt))
    slot = CacheSlot()
    runner.begin(slot, 40)
    first = runner.prefill(slot, text[:num_prompt])
    result_of(runner.resume(slot, text[:num_prompt], text[num_prompt:25], 40))
    again = CacheSlot()
    result_of(runner.resume(again, text[:num_prompt], text[num_prompt:25], 40))
    # The slot holds this text, but another part of it was the prompt.
    other = CacheSlot()
    runner.begin(other, 40)
    runner.prefill(other, text[:20])
    result_of(runner.resume(other, text[:num_prompt], text[num_prompt:25], 40))
    actual = torch.cat([first, *(last_logits(runner, each, text[:27]) for each in (slot, again, other))])
    last = expected[27 - num_prompt].expand(3, -1)
    assert difference_of(actual, torch.cat([expected[:1], last])) < 1e-5
    assert difference_of(plain_logits(runner, text[:27]), last[:1]) > 0.01, "the limits matter"


@pytest.mark.parametrize("model_type", ["jamba", "mamba", "recurrent_gemma", "minimax", "rwkv", "prophetnet"])
def test_model_that_cannot_continue_from_its_cache_is_refused(model_type):
    with pytest.raises(ModelError, match="nor chains of guesses") as caught:
        check_runner(make_runner(small_model(small_config(model_type), seed=1), prefill_chunk=7))
    assert len(str(caught.value).splitlines()) == 1


def test_tree_runner_is_chosen_if_trees_are_supported():
    assert type(make_runner(random_model("Llama"), 7)) is ModelRunner


def test_strict_exactness_is_refused_for_chains():
    with pytest.raises(ModelError, match="exactness=strict"):
        make_runner(model_of("lfm2_moe"), 7, strict_tokens=16)


def test_check_detects_states_that_are_not_restored(monkeypatch):
    runner = ChainRunner(model_of("qwen3_next"), 7)
    check_chains(runner)
    monkeypatch.setattr("lp_runtime.model.kv_cache.states._restore", lambda layer, saved: None)
    with pytest.raises(ModelError, match="differ from `generate`"):
        check_chains(runner)


def test_check_detects_slots_that_are_not_cleared(monkeypatch):
    monkeypatch.setattr(StateCache, "clear", TreeCache.clear)
    with pytest.raises(ModelError, match="differ from `generate`"):
        check_chains(ChainRunner(model_of("qwen3_next"), 7))


HELD = ("qwen3_next", "falcon_h1", "deepseek_v32")
MOST_HELD = slow(HELD, ["falcon_h1"])


@pytest.fixture(params=HELD)
def held(request) -> tuple[ChainRunner, CacheSlot, list[int]]:
    """Return a runner, a slot that holds 12 of a text's 30 tokens, and the text.

    A wrong chain was fed after the 12 tokens.
    """
    runner = ChainRunner(model_of(request.param), 5)
    text = torch.randint(8, runner.vocabulary_size, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    slot = CacheSlot()
    runner.begin(slot, 40)
    runner.prefill(slot, text[:12])
    tree = TokenTree(text[12:13], max_depth=9)
    tree.add_branch([text[13], text[13], text[13]])
    nodes = np.arange(len(tree))
    runner.forward(StepInputs(slot, tree, nodes, nodes, 12))
    return runner, slot, text


def last_logits(runner: ChainRunner, slot: CacheSlot, text: list[int]) -> torch.Tensor:
    """Return the logits of a text's last token; the slot holds the text's first tokens."""
    start = len(slot.tokens)
    tree = TokenTree(text[start:], max_depth=0)
    nodes = np.arange(len(tree))
    return runner.forward(StepInputs(slot, tree, nodes, nodes[-1:], start)).logits


@torch.inference_mode()
def plain_logits(runner: ChainRunner, text: list[int]) -> torch.Tensor:
    return runner.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1:]


def test_resume_reuses_the_tokens_in_the_slot(held):
    runner, slot, text = held
    before = runner.num_prefilled_tokens
    result_of(runner.resume(slot, text[:12], text[12:21], 60))
    assert slot.tokens == text[:20] and runner.num_prefilled_tokens - before == 8
    assert difference_of(last_logits(runner, slot, text), plain_logits(runner, text)) < 1e-5


@pytest.mark.parametrize("held", MOST_HELD, indirect=True)
def test_resume_of_another_sequence_starts_over(held):
    runner, slot, text = held
    other = text[::-1]
    result_of(runner.resume(slot, other[:12], other[12:21], 40))
    assert slot.tokens == other[:20]
    assert difference_of(last_logits(runner, slot, other), plain_logits(runner, other)) < 1e-5


def test_stored_prefix_survives_reuse_of_its_slot(held):
    runner, slot, text = held
    result_of(runner.resume(slot, text[:20], text[20:21], 60))
    prefixes = make_prefix_cache(runner, 1 << 30, None)
    prefixes.store(slot.cache, slot.tokens, 20, "")
    for sequence in (text[::-1], text):
        runner.begin(slot, 40)
        runner.prefill(slot, sequence[:10])
    runner.begin(slot, 40)
    prefixes.find(text, "").copy_into(slot.cache)
    slot.tokens = text[:20]
    assert difference_of(last_logits(runner, slot, text), plain_logits(runner, text)) < 1e-5


@pytest.mark.parametrize("held", MOST_HELD, indirect=True)
def test_uncommitted_share_does_not_change_the_slot(held):
    runner, slot, text = held
    tree = TokenTree(text[12:15], max_depth=0)
    nodes = np.arange(len(tree))
    runner.forward(StepInputs(slot, tree, nodes, nodes, 12), commit=False)
    assert slot.tokens == text[:12]
    assert difference_of(last_logits(runner, slot, text), plain_logits(runner, text)) < 1e-5


@pytest.mark.parametrize("branches", [[[9], [10], [11]], [[9, 10], [9, 11], [11, 9]]], ids=["one token", "two"])
def test_logits_after_each_works_with_an_empty_slot(branches):
    runner = ChainRunner(model_of("bamba"), 5)
    actual = runner.logits_after_each(CacheSlot(), branches, [8]).logits
    expected = torch.cat([plain_logits(runner, [8, *branch]) for branch in branches])
    assert difference_of(actual, expected) < 1e-5
