"""Prompt chunks under sliding windows: the keys that they read, and texts equal to transformers'."""

from __future__ import annotations

import pytest
import torch
from support.batches import FIXED, decode_alone
from support.one_slot import OneSlot
from support.small_models import FAMILIES, random_model
from support.thinned import slow, thinned
from torch.utils._python_dispatch import TorchDispatchMode

from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention import parts, tree_attention
from lp_runtime.model.attention.parts import attend_window
from lp_runtime.model.modules.fusing import fuse_blocks
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
WINDOW = 8  # tokens; the sliding window of all models below
CHUNK = 12
WINDOWED = ("mistral", "mixtral", "qwen2", "gemma3", "phi3", "gpt_oss", "starcoder2", "exaone4")
LIKE_MISTRAL = ("mixtral", "phi3", "starcoder2")  # a window in each layer


class Watch(TorchDispatchMode):
    """Records the number of keys that each call of an attention kernel receives."""

    def __init__(self):
        super().__init__()
        self.num_keys: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "_scaled_dot_product_flash_attention_for_cpu":
            self.num_keys.append(args[1].shape[2])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "groups", "length", "window"),
    thinned(3, TOLERANCES, [1, 3], [(1, 0), (1, 30), (9, 0), (11, 3), (11, 50)], [1, 4, 40]),
)
def test_attend_window_matches_dense_softmax(dtype, groups, length, window, monkeypatch):
    num_tokens, num_cached = length
    monkeypatch.setattr(parts, "WINDOW_BLOCK", 5)
    generator = torch.Generator().manual_seed(window)
    shapes = ((2 * groups, num_tokens), (2, num_cached + num_tokens), (2, num_cached + num_tokens))
    query, key, value = (
        torch.randn(1, count, heads, 16, generator=generator).to(dtype).transpose(1, 2) for heads, count in shapes
    )
    places = torch.arange(num_cached + num_tokens)
    own = places[num_cached:, None]
    seen = (places <= own) & (places > own - window)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    double = (query.double().reshape(1, 2, -1, 16), key.double(), value.double())
    for shorter in (value, value[..., :8]):
        scores = double[0] @ double[1].transpose(2, 3) * 0.3 + mask.repeat(groups, 1)
        expected = scores.softmax(-1) @ shorter.double(), scores.logsumexp(-1)
        output, total = attend_window(query, key, shorter, 0.3, window)
        for one, other in zip((output, total), expected, strict=True):
            torch.testing.assert_close(
                one.double().reshape(other.shape), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
            )


@pytest.mark.parametrize("family", slow(WINDOWED, LIKE_MISTRAL))
def test_windowed_model_matches_generate(family):
    """Prompts have several chunks: the first is longer than the window, and one has a single token."""
    name, settings = FAMILIES[family]
    whole = random_model(name, seed=3, initializer_range=0.3, **settings)
    prompt = tuple(3 + 7 * number % 50 for number in range(3 * CHUNK + 1))
    expected = whole.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=0)
    model = ModelRunner(whole, CHUNK, own_attention=True)
    assert model.passes.masks.is_own
    tokens, *_ = decode_alone(model, Request(prompt, FIXED, 20))
    assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_later_chunk_reads_only_the_window_and_its_own_keys(family):
    """Half of the layers have full attention, except in Mistral, where no layer has."""
    name, settings = FAMILIES[family]
    model = OneSlot(ModelRunner(random_model(name, seed=3, **settings), CHUNK, own_attention=True))
    model.begin(8 * CHUNK)
    model.prefill(range(1, 1 + 4 * CHUNK))
    with Watch() as watch:
        model.prefill(range(CHUNK))
    with_full_attention = [WINDOW - 1 + CHUNK, 4 * CHUNK, CHUNK]
    by_layer = {"mistral": [WINDOW - 1 + CHUNK] * 2, "gemma3": with_full_attention, "gpt_oss": with_full_attention}
    assert watch.num_keys == by_layer[family]


@pytest.mark.parametrize("fuses", [False, True])
def test_tree_with_sinks_reads_only_the_window(fuses, monkeypatch):
    name, settings = FAMILIES["gpt_oss"]
    model = OneSlot(ModelRunner(random_model(name, seed=3, **settings), CHUNK, own_attention=True))
    assert bool(fuses and fuse_blocks(model.model)) == fuses
    model.begin(100)
    model.prefill(range(40))
    num_keys, attend = [], tree_attention.attend_masked

    def watched(query, key, *args):
        num_keys.append(key.shape[2])
        return attend(query, key, *args)

    monkeypatch.setattr(tree_attention, "attend_masked", watched)
    tree = TokenTree([1, 2], max_depth=4)
    tree.add_branch([3, 4])
    nodes = list(range(len(tree)))
    model.forward(tree, nodes, nodes)
    assert num_keys == [WINDOW - 1 + len(tree), 40 + len(tree)]  # a sliding layer, and one with full attention
