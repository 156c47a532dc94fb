"""The start-up self-check: exact models pass, models that compute trees wrongly are refused."""

import pytest
import torch
from support.one_slot import OneSlot
from support.small_models import FAMILIES

from lp_runtime.errors import ModelError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.model.attention.mask import FULL, MaskBuilder
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.self_check import CROSSED_BY, SHORT_PROMPT, TOLERANCES, check_model

LOCAL = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}


def check(model) -> float:
    return check_model(ModelRunner(model, prefill_chunk=2048))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_exact_model_passes(random_model, attention):
    assert 0 <= check(random_model(attention=attention)) < 0.1 * TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_no_reason_to_refuse(random_model, dtype):
    assert check(random_model().to(dtype)) <= TOLERANCES[dtype]


class Unwindowed(MaskBuilder):
    """Knows its window, but leaves it out of the masks."""

    def _windowed(self, kind, ancestors, positions, num_cached):
        return super()._windowed(FULL, ancestors, positions, num_cached)


def test_the_check_is_longer_than_a_sliding_window(random_model):
    tree_model = ModelRunner(random_model("Mistral", sliding_window=100), prefill_chunk=2048)
    assert check_model(tree_model) < 1e-5
    tree_model.masks = Unwindowed(tree_model.model.config, "sdpa", tree_model.dtype, tree_model.device)
    with pytest.raises(ModelError, match="failed the start-up self-check"):
        check_model(tree_model)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Rwkv", {}), ("GPTNeo", LOCAL | {"window_size": 8})],
    ids=["rwkv", "gpt_neo"],
)
def test_a_model_that_is_silently_wrong_is_refused(random_model, name, settings):
    with pytest.raises(ModelError, match=f"{name}ForCausalLM failed the start-up self-check.*refused") as caught:
        check(random_model(name, attention="eager", **settings))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["Mamba", "Bloom"])
def test_a_model_that_cannot_be_fed_a_tree_is_refused(random_model, name):
    with pytest.raises(ModelError, match=f"(?i){name}.* cannot be fed a token tree") as caught:
        check(random_model(name, attention="eager"))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPTNeo", LOCAL | {"window_size": 64, "attention": "eager"}),
        ("Llama4", FAMILIES["llama4"][1] | {"attention_chunk_size": 64, "attention": "sdpa"}),
    ],
    ids=["gpt_neo", "llama4"],
)
def test_a_model_with_another_kind_of_local_window_is_right_past_it_or_refused(random_model, name, settings):
    """Their windows have other names than `sliding_window`; a check that is shorter than the window sees nothing."""
    model = random_model(name, **settings)
    tree_model = ModelRunner(model, prefill_chunk=2048)
    try:
        check_model(tree_model)
    except ModelError:
        return
    text = [(7 * i) % 61 for i in range(90)]
    tree = TokenTree([1], max_depth=5)
    for branch in ([2] * 4, [3] * 5, [4] * 5):
        last = tree.add_branch(branch)[-1]
    one = OneSlot(tree_model)
    one.begin(120)
    one.prefill(text)
    found = one.forward(tree, range(len(tree)), [last])[0]
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([text + [1] + [4] * 5]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(found / plain.std(), plain / plain.std(), rtol=0, atol=1e-3)


def test_only_windows_that_a_text_can_cross_are_crossed(random_model):
    lengths = []

    class Spy(ModelRunner):
        def prefill(self, slot, prompt):
            lengths.append(len(prompt))
            return super().prefill(slot, prompt)

    for window in (64, 256):  # the context is 256
        check_model(Spy(random_model("Mistral", sliding_window=window), prefill_chunk=2048))
    assert lengths == [64 + CROSSED_BY, SHORT_PROMPT]


def test_a_dtype_without_a_tolerance_is_refused(random_model):
    tree_model = ModelRunner(random_model(), prefill_chunk=2048)
    tree_model.dtype = torch.float8_e4m3fn
    with pytest.raises(ModelError, match="computes in torch.float8_e4m3fn: must be one of torch.float64, "):
        check_model(tree_model)


def test_a_context_too_short_to_check_is_refused(random_model):
    with pytest.raises(ModelError, match="a context of 8 tokens is too short"):
        check(random_model("GPT2", n_positions=8, max_position_embeddings=8))


def test_a_model_that_ignores_positions_it_is_given_is_refused(random_model):
    class Wrong(type(random_model())):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, position_ids=None, **kwargs)

    model = random_model()
    model.__class__ = Wrong
    with pytest.raises(ModelError, match="self-check"):
        check(model)
