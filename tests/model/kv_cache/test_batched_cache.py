"""Several texts in one forward pass, compared with each text alone."""

import random

import pytest
import torch
from support.thinned import slow, thinned
from support.trees import (
    ARCHITECTURES,
    assert_close,
    draw,
    plain_logits_of_nodes,
    random_tree,
)

from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.model.attention.mask import MaskForm
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.kv_cache.slots import CacheSlot
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import ready_model


@pytest.fixture(params=ARCHITECTURES)
def model(request, random_model):
    name, settings = ARCHITECTURES[request.param]
    return random_model(name, seed=1, attention="sdpa", **settings)


def begin(model: ModelRunner, lengths, rng: random.Random) -> list[tuple[CacheSlot, list[int]]]:
    """Return prefilled slots, each with its tokens."""
    slots = []
    for length in lengths:
        slot, tokens = CacheSlot(), draw(rng, length)
        model.begin(slot, 200)
        model.prefill(slot, tokens)
        slots.append((slot, tokens))
    return slots


# These always run in test_runner.py with our attention.
ALONE = ("mistral", "qwen2-sliding", "gpt_neox")


@pytest.mark.parametrize(("model", "apart"), thinned(2, slow(ARCHITECTURES, ALONE), [False, True]), indirect=["model"])
def test_batched_texts_match_each_text_alone(model, apart):
    rng = random.Random(3)
    tree_model = ModelRunner(model, 2048, own_attention=True)
    assert tree_model.supports_batching
    if apart:
        tree_model.passes.masks.form = MaskForm.TREE_ONLY
    texts = begin(tree_model, (21, 3, 40), rng)
    for step in range(3):
        fed = texts[step % 2 :]  # the texts may change from step to step
        trees = [random_tree(rng, rng.randint(1, 4)) for _ in fed]
        wanted = [range(tree.root, len(tree)) for tree in trees]
        parts = [
            StepInputs(slot, tree, range(len(tree)), some)
            for (slot, _), tree, some in zip(fed, trees, wanted, strict=True)
        ]
        logits = [actual.logits for actual in tree_model.forward_batch(parts)]
        for (text, tokens), tree, some, rows in zip(fed, trees, wanted, logits, strict=True):
            expected = plain_logits_of_nodes(model, tokens, tree)
            for node, row in zip(some, rows, strict=True):
                assert_close(row, expected[node])
            tokens += tree.tokens[: tree.root + 1]
            assert text.tokens == tokens and text.cache.length == len(tokens)


def test_demo_model_supports_batching():
    model, _ = ready_model(RuntimeConfig(model=ModelConfig(packing="off"), dtype="float32"), torch.device("cpu"))
    assert model.supports_batching
