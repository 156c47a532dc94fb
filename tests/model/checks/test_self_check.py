"""The start-up self-check: exact models pass, models that compute trees wrongly are refused."""

from types import SimpleNamespace

import pytest
import torch
from support.thinned import slow
from support.versions import needs_transformers

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.mask import MaskBuilder
from lp_runtime.model.checks.self_check import BEFORE_THRESHOLD, SHORT_PROMPT, check_model
from lp_runtime.model.forward.passes import Passes
from lp_runtime.model.hf.differences import TOLERANCES
from lp_runtime.model.runner import ModelRunner


def check(model) -> float:
    return check_model(ModelRunner(model, prefill_chunk=2048))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_exact_model_passes(random_model, attention):
    assert 0 <= check(random_model(attention=attention)) < 0.1 * TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_differences_are_accepted(random_model, dtype):
    assert check(random_model().to(dtype)) <= TOLERANCES[dtype]


def disturbed(model, where):
    """Change a model's logits after tokens for which `where` is true, in passes that continue a text.

    `where` receives the token ids of a pass and their indices in the pass, [T] each.
    """

    class Disturbed(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            cache = next((value for value in kwargs.values() if hasattr(value, "get_seq_length")), None)
            ids = kwargs["input_ids"][0]
            if cache is not None and cache.get_seq_length() > len(ids):
                logits = output.logits[0]
                index = torch.arange(len(ids))[-len(logits) :]
                wrong = where(ids[-len(logits) :], index)
                logits[wrong] = logits[wrong].roll(1, -1)
            return output

    model.__class__ = Disturbed
    return model


def test_token_dependent_differences_are_accepted_only_in_16_bits(random_model):
    """In a mixture of experts, rounding sends some tokens to other experts."""
    assert check(disturbed(random_model().bfloat16(), lambda ids, index: ids % 3 == 0)) <= TOLERANCES[torch.bfloat16]
    with pytest.raises(ModelError, match="failed the start-up self-check"):
        check(disturbed(random_model(), lambda ids, index: ids % 3 == 0))


def test_difference_at_a_fixed_tree_position_is_detected_in_16_bits(random_model):
    with pytest.raises(ModelError, match="failed the start-up self-check"):
        check(disturbed(random_model().bfloat16(), lambda ids, index: index == 4))


def test_check_crosses_the_sliding_window(random_model):
    tree_model = ModelRunner(random_model("Mistral", sliding_window=100), prefill_chunk=2048)
    assert check_model(tree_model) < 1e-5
    unwindowed = MaskBuilder(SimpleNamespace(), "sdpa", tree_model.dtype, tree_model.device)
    tree_model.passes = Passes(tree_model.model, unwindowed, None)
    with pytest.raises(ModelError, match="failed the start-up self-check"):
        check_model(tree_model)


NEEDS_DOGE = needs_transformers(23, "computes Doge's trees right within its window")
BEYOND = [  # models whose attention changes beyond a number of keys or a place in the input
    pytest.param("Doge", {"keep_window_size": 64}, "keep_window_size=64", marks=NEEDS_DOGE),
    pytest.param("Doge", {"keep_window_size": 200}, "keep_window_size=200", marks=NEEDS_DOGE),
    (
        "Llama4",
        {"no_rope_layers": [1, 0], "layer_types": None, "floor_scale": 100, "attn_scale": 0.1},
        "floor_scale=100",
    ),
]


@pytest.mark.parametrize(("name", "settings", "where"), BEYOND, ids=lambda value: value if type(value) is str else "")
@pytest.mark.parametrize("seed", slow(range(3), (1, 2)))
def test_model_that_is_wrong_beyond_a_length_is_refused(random_model, monkeypatch, name, settings, where, seed):
    """The check by model type is disabled, so that only the self-check can find the error."""
    monkeypatch.setattr("lp_runtime.model.runner.check_family", lambda model: None)
    sizes = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64} if name == "Llama4" else {}
    model = random_model(name, seed=seed, initializer_range=0.3, **settings, **sizes)
    with pytest.raises(
        ModelError, match=f"{name}ForCausalLM failed the start-up self-check: .* around {where} "
    ) as caught:
        check(model)
    assert len(str(caught.value).splitlines()) == 1


def test_model_without_position_ids_is_refused(random_model):
    model = random_model("Bart", d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64)
    with pytest.raises(ModelError, match="^BartForCausalLM failed the start-up self-check.* no position_ids") as caught:
        check(model)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["Mamba", "Bloom"])
def test_model_that_cannot_process_trees_is_refused(random_model, name):
    with pytest.raises(ModelError, match=f"(?i){name}.* cannot be fed a token tree") as caught:
        check(random_model(name, attention="eager"))
    assert len(str(caught.value).splitlines()) == 1


def test_window_as_long_as_the_context_is_not_checked(random_model):
    lengths = []

    class Spy(ModelRunner):
        def prefill(self, slot, prompt):
            lengths.append(len(prompt))
            return super().prefill(slot, prompt)

    longest = []
    for window in (64, 256):  # the context is 256
        check_model(Spy(random_model("Mistral", sliding_window=window), prefill_chunk=2048))
        longest.append(max(lengths))
        lengths.clear()
    assert longest == [64 - BEFORE_THRESHOLD, SHORT_PROMPT]


def test_dtype_without_tolerance_is_refused(random_model):
    tree_model = ModelRunner(random_model(), prefill_chunk=2048)
    tree_model.dtype = torch.float8_e4m3fn
    with pytest.raises(ModelError, match="computes in torch.float8_e4m3fn: must be one of torch.float64, "):
        check_model(tree_model)


def test_context_too_short_to_check_is_refused(random_model):
    with pytest.raises(ModelError, match="a context of 8 tokens is too short"):
        check(random_model("GPT2", n_positions=8, max_position_embeddings=8))


def test_model_that_ignores_position_ids_is_refused(random_model):
    class Wrong(type(random_model())):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, position_ids=None, **kwargs)

    model = random_model()
    model.__class__ = Wrong
    with pytest.raises(ModelError, match="self-check"):
        check(model)


def test_model_whose_generate_passes_other_positions_is_refused(random_model):
    """The model agrees with itself; only its `generate` does not, as that of Kosmos-2.5."""

    class Shifted(type(random_model())):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            return inputs | {"position_ids": 2 * inputs["position_ids"]}

    model = random_model()
    model.__class__ = Shifted
    with pytest.raises(ModelError, match="self-check: a tree step differs from `generate` by") as caught:
        check(model)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mistral", {"sliding_window": 1}),
        pytest.param("Phi3", {"sliding_window": 1}, marks=pytest.mark.slow),
    ],
)
def test_window_of_one_token_is_refused(random_model, name, settings):
    """transformers keeps all keys in the cache of such a layer, and `generate` reads them."""
    with pytest.raises(ModelError, match="a tree step differs from `generate` by"):
        check(random_model(name, initializer_range=0.3, **settings))


def test_generation_config_of_the_model_is_ignored(random_model):
    model = random_model()
    model.generation_config.update(
        eos_token_id=list(range(model.config.vocab_size)), do_sample=True, num_beams=3, min_new_tokens=9, max_length=3
    )
    assert check(model) < TOLERANCES[torch.float32]
    assert model.generation_config.num_beams == 3


def test_override_of_generate_is_not_called(random_model):
    """Janus's drops the caller's processors, with which the check chooses the tokens."""

    class Overriding(type(random_model())):
        def generate(self, *args, logits_processor=None, **kwargs):
            return super().generate(*args, **kwargs)

    model = random_model()
    model.__class__ = Overriding
    assert check(model) < TOLERANCES[torch.float32]


def test_token_with_minus_infinity_logit_is_accepted(random_model):
    model = random_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    with torch.no_grad():
        model.lm_head.bias[3] = float("-inf")
    assert check(model) < TOLERANCES[torch.float32]


def test_nan_logits_beyond_a_length_are_reported(random_model):
    class Overflowing(type(random_model("Mistral"))):
        def forward(self, *args, position_ids=None, **kwargs):
            output = super().forward(*args, position_ids=position_ids, **kwargs)
            return (
                output
                if position_ids is None or position_ids.max() < 60
                else type(output)(
                    logits=torch.full_like(output.logits, float("nan")), past_key_values=output.get("past_key_values")
                )
            )

    model = random_model("Mistral", sliding_window=64)
    model.__class__ = Overflowing
    with pytest.raises(ModelError, match="its logits are NaN around sliding_window=64"):
        check(model)


def test_nan_logits_are_reported(random_model):
    model = random_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match="its logits are NaN"):
        check(model)
