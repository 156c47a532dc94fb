"""A tree's forward pass, compared with plain forward passes of the same texts, on tiny random models."""

import random
from types import SimpleNamespace

import pytest
import torch
from support import small_models
from support.one_slot import OneSlot
from support.trees import (
    ARCHITECTURES,
    assert_close,
    draw,
    path_text,
    plain_logits,
    plain_logits_of_nodes,
    random_tree,
)
from support.versions import needs_rotary_by_length

from lp_runtime.distributed.partition.partition import partition
from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention.mask import MaskForm
from lp_runtime.model.attention.tree_attention import NAME as TREE
from lp_runtime.model.hf.config import attention_settings, of_text_model
from lp_runtime.model.runner import ModelRunner

BATCHED = ("qwen2", "qwen3", "phi3")  # always run in test_batched_cache.py with our attention


def kinds() -> list[object]:
    """Return (architecture, attention) pairs; sdpa and eager always run with every third architecture."""
    pairs = [
        ((name, attention), name in BATCHED if attention == "own" else (place + number) % 3 > 0)
        for place, name in enumerate(ARCHITECTURES)
        for number, attention in enumerate(("sdpa", "eager", "own"))
    ]
    return [pytest.param(pair, marks=pytest.mark.slow if is_slow else ()) for pair, is_slow in pairs]


@pytest.fixture(scope="module", params=kinds(), ids="-".join)
def model(request, random_model):
    architecture, attention = request.param
    name, settings = ARCHITECTURES[architecture]
    if attention != "own":
        return random_model(name, seed=1, attention=attention, **settings)
    model = random_model(name, seed=1, attention="sdpa", **settings)
    ModelRunner(model, 2048, own_attention=True)
    assert model.config.get_text_config()._attn_implementation == TREE
    return model


def test_tree_logits_match_plain_text_in_each_step(model):
    rng = random.Random(2)
    tree_model = OneSlot(ModelRunner(model, prefill_chunk=2048))
    text = draw(rng, 21)
    tree_model.begin(200)
    assert_close(tree_model.prefill(text)[0], plain_logits(model, text))
    for num_pending in (3, 1, 5):
        tree = random_tree(rng, num_pending)
        wanted = list(range(tree.root, len(tree)))
        logits = tree_model.forward(tree, range(len(tree)), wanted)
        assert logits.shape == (len(wanted), 64)
        expected = plain_logits_of_nodes(model, text, tree)
        for node, actual in zip(wanted, logits, strict=True):
            assert_close(actual, expected[node])
        text += tree.tokens[: tree.root + 1]


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(20, marks=pytest.mark.slow)]
)
def test_chunked_prefill_matches_plain_text(model, chunk):
    text = draw(random.Random(chunk), 41)
    tree_model = OneSlot(ModelRunner(model, prefill_chunk=chunk))
    tree_model.begin(200)
    assert_close(tree_model.prefill(text)[0], plain_logits(model, text))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt2"])
def test_separate_prefix_and_tree_attention_matches_plain_text(architecture, random_model):
    rng = random.Random(6)
    name, settings = ARCHITECTURES[architecture]
    model = random_model(name, seed=1, attention="sdpa", **settings)
    tree_model = OneSlot(ModelRunner(model, 2048, own_attention=True))
    tree_model.passes.masks.form = MaskForm.TREE_ONLY
    text = draw(rng, 6 if "sliding_window" in settings else 40)  # the window hides nothing at first
    tree_model.begin(200)
    tree_model.prefill(text)
    for num_pending in (3, 1):
        tree = random_tree(rng, num_pending)
        logits = tree_model.forward(tree, range(len(tree)), range(tree.root, len(tree)))
        expected = plain_logits_of_nodes(model, text, tree)
        for node, actual in zip(range(tree.root, len(tree)), logits, strict=True):
            assert_close(actual, expected[node])
        text += tree.tokens[: tree.root + 1]


def test_shares_match_the_whole_tree(model):
    rng = random.Random(3)
    prompt = draw(rng, 13)
    steps = [random_tree(rng, num_pending) for num_pending in (2, 4)]
    whole = OneSlot(ModelRunner(model, prefill_chunk=2048))
    whole.begin(200)
    whole.prefill(prompt)
    expected = [whole.forward(tree, range(len(tree)), range(tree.root, len(tree))) for tree in steps]
    for rank in range(3):
        replica = OneSlot(ModelRunner(model, prefill_chunk=2048))
        replica.begin(200)
        replica.prefill(prompt)
        for tree, all_logits in zip(steps, expected, strict=True):
            share = partition(tree, [1.0] * 3)[rank]
            logits = replica.forward(tree, share.nodes, share.owned)
            assert_close(logits, all_logits[[node - tree.root for node in share.owned]])


@pytest.mark.parametrize("chunk", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_tree_after_chunked_prefill_matches_single_prefill(model, chunk):
    rng = random.Random(4)
    prompt = draw(rng, 20)
    tree = random_tree(rng, 2)
    results = []
    for size in (2048, chunk):
        tree_model = OneSlot(ModelRunner(model, prefill_chunk=size))
        tree_model.begin(100)
        last = tree_model.prefill(prompt)
        assert last.shape == (1, 64)
        results.append(torch.cat([last, tree_model.forward(tree, range(len(tree)), range(tree.root, len(tree)))]))
    assert_close(results[1], results[0])


def test_request_does_not_affect_the_next_request(random_model):
    rng = random.Random(5)
    model = random_model()
    tree_model = OneSlot(ModelRunner(model, prefill_chunk=2048))
    tree = random_tree(rng, 2)
    for capacity in (100, 60, 150):
        prompt = draw(rng, 11)
        tree_model.begin(capacity)
        assert_close(tree_model.prefill(prompt)[0], plain_logits(model, prompt))
        (actual,) = tree_model.forward(tree, range(len(tree)), [len(tree) - 1])
        assert_close(actual, plain_logits(model, prompt + path_text(tree, len(tree) - 1)))


def test_share_without_leaves_caches_pending_tokens(random_model):
    rng = random.Random(6)
    model = random_model()
    tree_model = OneSlot(ModelRunner(model, prefill_chunk=2048))
    prompt = draw(rng, 9)
    tree_model.begin(100)
    tree_model.prefill(prompt)
    first, second = TokenTree([1, 2, 3], max_depth=5), TokenTree([4], max_depth=5)
    assert tree_model.forward(first, [0, 1, 2], []).shape == (0, 64)
    assert_close(tree_model.forward(second, [0], [0])[0], plain_logits(model, prompt + [1, 2, 3, 4]))


def test_attention_without_tree_masks_is_refused(random_model):
    model = random_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="attn_implementation=flash_attention_2: must be one of sdpa, eager"):
        ModelRunner(model, prefill_chunk=2048)


@needs_rotary_by_length
def test_length_dependent_rotary_cuts_the_context_only_if_strict(random_model):
    name, settings = small_models.FAMILIES["phi3_longrope"]
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.5}}
    assert ModelRunner(random_model(name, **settings), 2048).context_length == 256
    assert ModelRunner(random_model(name, **settings), 2048, strict_tokens=16).context_length == 64
    assert ModelRunner(random_model("Llama", **dynamic), 2048).context_length == 640
    assert ModelRunner(random_model("Phi3"), 2048).context_length == 256


def test_attention_settings_are_kept_per_sub_model(random_model):
    model = random_model("Llama")
    assert attention_settings(model) == "sdpa"
    assert of_text_model(model, "eager") == "eager"
    parts = SimpleNamespace(
        sub_configs={"text_config": None, "vision_config": None},
        _attn_implementation="sdpa",
        text_config=SimpleNamespace(_attn_implementation="sdpa"),
        vision_config=SimpleNamespace(_attn_implementation="eager"),
    )
    parts.get_text_config = lambda: parts.text_config
    model = SimpleNamespace(config=parts)
    assert attention_settings(model) == {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    assert of_text_model(model, "x") == {"": "sdpa", "text_config": "x", "vision_config": "eager"}
