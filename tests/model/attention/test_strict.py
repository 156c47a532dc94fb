"""exactness=strict: no bit of a token's logits depends on how its sequence was fed."""

import pytest
import torch
from support.engines import engine_of
from support.one_slot import OneSlot
from support.small_models import FAMILIES, random_model
from support.thinned import thinned

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention import strict
from lp_runtime.model.attention.strict import BLOCK, KEYS, POSITION, tail_table
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.loading.loader import load_model, load_tokenizer
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

ALWAYS = ("llama", "gpt_oss")  # the others are marked slow: together they take long

CPU = torch.device("cpu")
# These families cannot be strict: their attention cannot be replaced (falcon, gptj), their experts' bits depend on the
# rest of the pass (gpt_oss), or their attention is chunked (llama4).
NOT_STRICT = ("falcon", "gptj", "gpt_oss", "llama4")
HALF = [torch.bfloat16, torch.float16]


def decode(model: ModelRunner, request: Request) -> list[int]:
    *outputs, _ = engine_of(model).run(request)
    return [token for output in outputs for token in output.token_ids]


def test_tail_table_lists_the_keys_of_each_path():
    parents = [-1, 0, 1, 1, 3]  # two pending tokens, then two branches
    for num_cached in (1, 5, BLOCK - 3, BLOCK, 2 * BLOCK - 2, 5 * BLOCK + 7):
        table = tail_table(num_cached, parents, window=0)
        for token, path in enumerate(([0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4])):
            position = num_cached + len(path) - 1
            assert table[token, POSITION] == position
            places = [*range(num_cached), *(num_cached + node for node in path)]
            start = (position // BLOCK - 1) * BLOCK
            expected = [places[at] if 0 <= at <= position else -1 for at in range(start, start + 2 * BLOCK)]
            assert table[token, KEYS:].tolist() == expected
            assert all(places[at] == at for at in range(max(0, start)))  # the head is committed


@pytest.mark.parametrize("dtype", thinned(3, [HALF[0], HALF[1], torch.float32]))
def test_strict_logits_equal_single_token_steps_bitwise(small_demo_dir, dtype):
    model = load_model(ModelConfig(path=str(small_demo_dir)), CPU, "float32").to(dtype)
    text = [(7 * i * i) % 4096 for i in range(8)]
    others = [[(11 * i * j + 5) % 4096 for i in range(1, 2 + j)] for j in range(5)]  # with the text, several passes
    differed = 0
    for strict_tokens, lengths in ((16, (9, 122, 250)), (None, (122,))):
        tree_model = OneSlot(ModelRunner(model, 2048, strict_tokens))
        for length in lengths:
            prompt = [(13 * i) % 4096 for i in range(length)]
            tree_model.begin(600)
            tree_model.prefill(prompt)
            plain = [tree_model.forward(TokenTree([token], 0), [0], [0])[0] for token in text]
            for num_pending in (1, 4):
                tree = TokenTree(text[:num_pending], 20)
                for branch in others:
                    tree.add_branch(branch)
                nodes = [tree.root, *tree.add_branch(text[num_pending:])]
                tree_model.begin(600)
                tree_model.prefill(prompt)
                logits = tree_model.forward(tree, range(len(tree)), nodes)
                same = all(map(torch.equal, logits, plain[num_pending - 1 :]))
                if strict_tokens:
                    assert same, (length, num_pending, strict_tokens)
                differed += not same
    assert differed or dtype == torch.float32  # without strict_tokens they must differ, or the test shows nothing


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FAMILIES]
)
def test_families_are_strict_or_refused(family):
    name, settings = FAMILIES[family]
    model = random_model(name, seed=1, initializer_range=0.3, **settings).to(torch.bfloat16)
    if family in NOT_STRICT:
        with pytest.raises(ModelError, match="exactness=strict"):
            check_model(ModelRunner(model.float(), 2048, strict_tokens=16))
        return
    tree_model = ModelRunner(model, 2048, strict_tokens=16)
    check_model(tree_model)
    prompt = tuple(torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(0)).tolist())
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.9, seed=0)):
        expected = decode(tree_model, Request(prompt, PLAIN, 8, sampling=sampling))
        for lookahead in (LookaheadConfig(5, 4, 5), LookaheadConfig(15, 5, 15)):
            assert decode(tree_model, Request(prompt, lookahead, 8, sampling=sampling)) == expected


@pytest.mark.slow
def test_each_pass_of_a_split_tree_counts_as_a_step(demo_model_dir):
    model = load_model(ModelConfig(path=str(demo_model_dir)), CPU, "bfloat16")
    ids = tuple(load_tokenizer(ModelConfig(path=str(demo_model_dir)))("def fib(n):").input_ids)
    steps = {}
    for size in (8, 128):
        *outputs, report = engine_of(ModelRunner(model, 2048, size)).run(Request(ids, LookaheadConfig(7, 5, 7), 8))
        steps[size] = report.num_steps, len(outputs)
    assert steps[128][0] == steps[128][1]
    assert steps[8][0] > steps[8][1]


def test_model_with_pass_dependent_bits_is_refused(random_model, monkeypatch):
    model = random_model().to(torch.bfloat16)
    check_model(ModelRunner(model, 2048, strict_tokens=16))
    monkeypatch.setattr(strict, "_sum_of_pairs", lambda values: values.sum(1))
    feed = Passes.forward

    def sloppy(self, ids, positions, mask, cache, rows, *view):
        """Add an error that depends on a token's row in the pass, as a kernel's rounding might."""
        logits = feed(self, ids, positions, mask, cache, rows, *view)
        return logits + 1e-3 * torch.arange(len(logits))[:, None] * (mask is not None)

    monkeypatch.setattr(Passes, "forward", sloppy)
    with pytest.raises(ModelError, match="failed the check of exactness=strict: its logits depend on what else is fed"):
        check_model(ModelRunner(model, 2048, strict_tokens=16))
