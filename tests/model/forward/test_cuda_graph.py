"""Passes of fixed sizes, run without capture: CUDA graphs need a GPU, but their operations do not."""

from __future__ import annotations

import random

import pytest
import torch
from support.one_slot import OneSlot
from support.stand_ins import KERNELS
from support.thinned import slow, thinned

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.checks import self_check
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.forward import cuda_graph
from lp_runtime.model.forward.fixed_passes import MAX_SEQUENCES, SIZES, FixedPasses
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import CAPACITY_UNIT, ModelRunner
from lp_runtime.replica import loading


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> None:
    """Replace Triton's attention kernels by PyTorch operations; tests/kernels tests the kernels."""
    monkeypatch.setattr(cuda_graph, "kernels_for", lambda device: KERNELS)


FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 24},
    "Phi3": {},
    "GPT2": {},
    "Gemma3": {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


def pair(random_model, name: str = "Llama", **settings) -> tuple[ModelRunner, ModelRunner]:
    """Return the same model twice: with passes of any size, and with passes of fixed sizes."""
    models = [OneSlot(ModelRunner(random_model(name, seed=3, **settings), 512, own_attention=True)) for _ in range(2)]
    models[1].enable_graphs(capture=False)
    return models[0], models[1]


def random_tree(rng: random.Random, num_pending: int, num_guesses: int) -> TokenTree:
    tree = TokenTree([rng.randrange(60) for _ in range(num_pending)], max_depth=16)
    while len(tree) < num_pending + num_guesses:
        tree.add(rng.randrange(tree.root, len(tree)), rng.randrange(60))
    return tree


@pytest.mark.parametrize("name", slow(FAMILIES, ("Qwen2", "Qwen3", "Phi3")))  # these cache as Llama does
def test_fixed_size_steps_match_variable_size_steps(random_model, name, monkeypatch):
    free, fixed = pair(random_model, name, **FAMILIES[name])
    fed = []
    forward = FixedPasses.forward
    monkeypatch.setattr(FixedPasses, "forward", lambda self, *each: fed.append(each) or forward(self, *each))
    rng = random.Random(0)
    for model in (free, fixed):
        model.begin(400)
        model.prefill(list(range(10)))
    # These steps cross the sliding window of 24 tokens.
    for num_pending, num_guesses in ((1, 0), (1, 6), (3, 0), (2, 31), (5, 3), (1, 90), (4, 20), (1, 2)):
        tree = random_tree(rng, num_pending, num_guesses)
        nodes = list(range(len(tree)))
        wanted = nodes[tree.root :: 2]
        logits = [model.forward(tree, nodes, wanted) for model in (free, fixed)]
        assert logits[0].shape == logits[1].shape and logits[1].dtype == torch.float32
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert len(fed) == 8


def test_fixed_size_shares_match_variable_size_shares(random_model):
    """One share of a tree is fed without committing, then another share is fed and committed."""
    free, fixed = pair(random_model)
    tree = random_tree(random.Random(1), 2, 12)
    path = [node for node in range(len(tree)) if node <= tree.root or tree.parents[node] <= tree.root]
    for model in (free, fixed):
        model.begin(64)
        model.prefill([5, 6, 7])
    for nodes, commit in ((list(range(len(tree))), False), (path, True), (path, True)):
        logits = [model.forward(tree, nodes, nodes[1:], commit) for model in (free, fixed)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_cache_contents_after_committed_tokens_are_ignored(random_model):
    free, fixed = pair(random_model)
    for model in (free, fixed):
        model.begin(64)
        model.prefill([5, 6, 7])
        with torch.inference_mode():
            for layer in model.slot.cache.layers:
                layer.keys[:, :, 3:] = layer.values[:, :, 3:] = torch.nan
    tree = random_tree(random.Random(2), 1, 8)
    nodes = list(range(len(tree)))
    torch.testing.assert_close(*(model.forward(tree, nodes, nodes) for model in (free, fixed)), rtol=1e-4, atol=1e-4)


def test_larger_cache_or_new_slot_needs_no_new_passes(random_model):
    """A larger cache or another slot does not require new passes."""
    free, fixed = pair(random_model, max_position_embeddings=4096)
    rng = random.Random(4)
    text = [rng.randrange(60) for _ in range(CAPACITY_UNIT + 40)]
    made = []
    for length in (20, len(text), 30):
        tree = random_tree(rng, 1, 20)
        nodes = list(range(len(tree)))
        fixed.slot = CacheSlot()
        for model in (free, fixed):
            model.begin(length + 400)
            model.prefill(text[:length])
        assert fixed.slot.cache.capacity % CAPACITY_UNIT == 0
        logits = [model.forward(tree, nodes, nodes) for model in (free, fixed)]
        torch.testing.assert_close(*logits, rtol=2e-4, atol=2e-4)
        made.append(fixed.fixed_passes.make(len(tree), 1))
    assert made == [False] * 3


def test_grown_slot_keeps_its_contents(random_model):
    free, fixed = pair(random_model, max_position_embeddings=4096)
    tree = random_tree(random.Random(5), 1, 6)
    nodes = list(range(len(tree)))
    for model in (free, fixed):
        model.begin(64)
        model.prefill([5, 6, 7])
        model.forward(tree, nodes, nodes)
        model.slot.cache.grow(3 * CAPACITY_UNIT)
    torch.testing.assert_close(*(model.forward(tree, nodes, nodes) for model in (free, fixed)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_sequences"), thinned(3, ["Llama", "Mistral", "Gemma3"], [2, 5, MAX_SEQUENCES + 3])
)
def test_batch_matches_each_sequence_alone(random_model, name, num_sequences):
    free, fixed = pair(random_model, name, **FAMILIES[name])
    rng = random.Random(num_sequences)
    for _ in range(2):
        batches = [[], []]
        for number in range(num_sequences):
            text, tree = [rng.randrange(60) for _ in range(3 + 5 * number)], random_tree(rng, 1, rng.randrange(9))
            for model, batch in zip((free, fixed), batches, strict=True):
                slot = CacheSlot()
                model.runner.begin(slot, 200)
                model.runner.prefill(slot, text)
                batch.append(StepInputs.whole(slot, tree))
        expected = [free.runner.forward(each).logits for each in batches[0]]
        for one, other in zip(expected, fixed.forward_batch(batches[1]), strict=True):
            torch.testing.assert_close(one, other.logits, rtol=1e-4, atol=1e-4)
            assert len(other.presampled) == len(one)
    assert all(one.slot.tokens == other.slot.tokens for one, other in zip(*batches, strict=True))


def test_batch_above_the_largest_size_matches_each_sequence_alone(random_model):
    free, fixed = pair(random_model)
    rng = random.Random(6)
    trees = [random_tree(rng, 1, size - 1) for size in (SIZES[-1] - 3, 2, 9)]
    batches = []
    for model in (free, fixed):
        slots = [CacheSlot() for _ in trees]
        for slot in slots:
            model.runner.begin(slot, SIZES[-1] + 8)
            model.runner.prefill(slot, [1, 2])
        batches.append([StepInputs.whole(slot, tree) for slot, tree in zip(slots, trees, strict=True)])
    expected = [free.runner.forward(each).logits for each in batches[0]]
    for one, other in zip(expected, fixed.forward_batch(batches[1]), strict=True):
        torch.testing.assert_close(one, other.logits, rtol=2e-4, atol=2e-4)


def test_passes_match_at_each_size_and_one_token_above(random_model):
    free, fixed = pair(random_model)
    for size in [each + more for each in SIZES for more in (0, 1)]:
        tree = random_tree(random.Random(size), 1, size - 1)
        nodes = list(range(len(tree)))
        for model in (free, fixed):
            model.begin(SIZES[-1] + 32)
            model.prefill([1, 2, 3])
        logits = [model.forward(tree, nodes, nodes) for model in (free, fixed)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_self_check_passes_with_and_without_graphs(random_model):
    _, fixed = pair(random_model)
    assert fixed.graphs and check_model(fixed.runner) < 1e-4
    fixed.runner.disable_graphs("a reason")
    assert fixed.graphs is None and check_model(fixed.runner) < 1e-4


def test_batches_go_on_if_they_fail_only_with_graphs(random_model, monkeypatch):
    def check(model: ModelRunner) -> float:
        if model.graphs is not None:
            model.refuses_batches = True
            raise ModelError("a captured pass differs")
        return check_model(model)

    monkeypatch.setattr(self_check, "check_model", check)
    _, fixed = pair(random_model)
    assert self_check.check_model_or_disable_graphs(fixed.runner) < 1e-4
    assert fixed.graphs is None and fixed.runner.supports_batching


def test_failed_capture_falls_back_to_compile_off(tiny_model_dir, monkeypatch, caplog):
    """Capture fails here because there is no GPU; any other failure at start-up is handled the same way."""
    monkeypatch.setattr(loading, "why_uncapturable", lambda model: None)
    config = RuntimeConfig(model=ModelConfig(path=str(tiny_model_dir)))
    model, difference = loading.ready_model(config, torch.device("cpu"))
    assert model.graphs is None and difference < 1e-4
    assert f"{model.why_no_graphs}; going on with compile=off" in caplog.text
